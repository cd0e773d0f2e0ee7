"""`Kernels` in Triton, for NVIDIA GPUs of compute capability 8.0 and later."""

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.cache import KVPool
from soothsay.model.gpu import tiles
from soothsay.model.gpu.gpu_layers import LARGEST_HEAD, GpuLayers
from soothsay.model.gpu.gpu_linear import GpuLinear, gpu_linear
from soothsay.model.gpu.gpu_passes import GpuPasses, GraphRecorder
from soothsay.model.gpu.gpu_plan import padded_rows
from soothsay.model.gpu.gpu_sampling import GpuSampling
from soothsay.model.gpu.integer_weight import IntegerWeight
from soothsay.model.loaded_part import Table
from soothsay.model.ops.kernels import Outputs, PassModel
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.model_spec import LayerSpec, ModelSpec
from soothsay.model.weights.quantized import Integers, QuantizedTable

SIZES = 16
"""Sizes of rows must be multiples of this."""


class GpuKernels(GpuLayers):
    """The kernels of one device.

    A row's bits depend on the row alone: not on other rows, and not on which multiprocessor computes it. They
    depend on the compute capability, and on the versions of Triton and of the table of tiles.

    Args:
        device: where the weights will be. A CPU, where Triton's interpreter runs the kernels, is for tests.
    """

    integers_on = "cuda", "cpu"
    dtype_of_keys = torch.float16
    quantizes_kv = False

    def __init__(self, device: torch.device | str):
        self.device, where = torch.device(device), "its interpreter"
        if self.device.type == "cuda":
            about = torch.cuda.get_device_properties(self.device)
            self.programs = 2 * about.multi_processor_count
            where = f"compute capability {about.major}.{about.minor}"
        self.sampling = GpuSampling()
        self.passes = GpuPasses(GraphRecorder()) if self.device.type == "cuda" else None
        self.name = f"Triton {triton.__version__} on {where}, tiles {tiles.VERSION}"

    @staticmethod
    def fit(spec: ModelSpec) -> bool:
        """See `Kernels`: dense decoders with attention in every layer."""
        is_alone = spec.source is None
        return is_alone and spec.hidden_size % SIZES == 0 and all(map(_fits, spec.layers))

    def padded(self, rows: int) -> int:
        """See `LayoutOps`."""
        return padded_rows(rows)

    def run_pass(
        self,
        model: PassModel,
        batch: Batch,
        cache: KVPool | None,
        layers: Sequence[int] | None,
        taps: Sequence[int],
    ) -> Outputs:
        """See `Kernels`."""
        run = model.compute if self.passes is None else partial(self.passes, model)
        return run(batch, cache, layers, taps)

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """See `Kernels`."""
        if GpuLinear.fit(weight):
            return gpu_linear(weight, bias, dtype, self.device)
        return super().linear(weight, bias, dtype)

    def table(self, table: QuantizedTable, head: nn.Module | None) -> Table:
        """See `Kernels`."""
        same = head.weight if isinstance(head, GpuLinear) else None
        return same if isinstance(same, IntegerWeight) else IntegerWeight(table, self.device)


def _fits(layer: LayerSpec) -> bool:
    if layer.input is not None or layer.alternating is not None:
        return False
    for part in layer.parts:
        match part:
            case AttentionSpec():
                if part.size % SIZES or part.size > LARGEST_HEAD:
                    return False
            case DenseSpec():
                if part.size % SIZES:
                    return False
            case _:
                return False
    return True
