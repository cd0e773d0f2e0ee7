"""`Kernels` in C: a library for each instruction set, called through ctypes, and the models it fits."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, byref
from typing import Any

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch, Rows, Windows
from soothsay.mapped_memory import LargePages
from soothsay.model.decoder.decoder_block import DecoderBlock
from soothsay.model.loaded_part import Table
from soothsay.model.native.layout import native_batch
from soothsay.model.native.library import VARIANTS, Library
from soothsay.model.native.native_blocks import NativeBlocks
from soothsay.model.native.native_linear import ACTIVATIONS, NativeLinear, Routing, address
from soothsay.model.native.native_sampling import NativeSampling
from soothsay.model.native.operations import NOTHING, LowRank, NativeOperations, States, places_of
from soothsay.model.native.program import KV_FORMATS, LayerRun, Operation, Reads
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Parts
from soothsay.model.ops.operands import Norm
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import XIELU, DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import ModelSpec, Part
from soothsay.model.specs.state_specs import (
    ConvolutionSpec,
    DeltaSpec,
    KimiDeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)
from soothsay.model.weights.quantized import Integers, Mixed, QuantizedTable

LANES = 16
"""Sizes of rows must be multiples of this, and head dimensions multiples of twice this."""

MAX_ROW = 1024
"""Limit of a head's dimensions in the KV pool."""


def fits(spec: ModelSpec) -> bool:
    """Whether the kernels can compute a model of these sizes."""
    sizes = [spec.hidden_size]
    for layer in (*spec.layers, *spec.encoder_layers):
        sizes += [] if layer.input is None else [layer.input.size]
        sizes += [] if layer.alternating is None else [layer.alternating.laurel_rank]
        for part in layer.parts:
            if not (own := _sizes(part)):
                return False
            sizes += own
    return not any(size % LANES for size in sizes)


def _sizes(part: Part) -> list[int]:
    """The sizes of a part that must be multiples of `LANES`. Empty: the kernels cannot compute it."""
    match part:
        case AttentionSpec():
            return [part.size // 2] if part.size <= MAX_ROW else []
        case LatentSpec():
            row = part.rank + part.rotated
            return [row // 2, part.rank, part.query_rank or 0, part.rotated // 2] if row <= MAX_ROW else []
        case KimiDeltaSpec():
            return [part.key_size, part.value_size, part.rank]
        case DeltaSpec():
            return [part.key_size, part.value_size]
        case ConvolutionSpec():
            return [part.channels]
        case SelectiveSpec():
            return [part.width, part.state_size, part.rank]
        case StateSpaceSpec():
            return [part.head_size, part.state_size]
        case DenseSpec():
            return [part.size] if part.activation in (*ACTIVATIONS, XIELU) else []
        case ExpertsSpec():
            shared = [] if part.shared is None else _sizes(part.shared)
            return [*_sizes(part.expert), *shared, part.latent_size or 0] if _sizes(part.expert) else []


class NativeKernels(NativeOperations, Library, Kernels):
    """The kernels of one compiled library.

    A row's bits depend on the row alone, not on other rows or the number of threads. If the library
    multiplies bfloat16 and the KV pool has that type, queries and softmax weights are rounded to bfloat16
    before they are multiplied. With integer keys, queries are rounded to integers, and softmax weights as
    values are.

    Raises `OSError` if the library is missing or cannot run on this processor.
    """

    dtype_of_keys = torch.int16

    def __init__(self, variant: str):
        super().__init__(variant)
        self.name, self.memory = f"native, {variant}", LargePages()
        self.sampling = NativeSampling(variant)

    fit = staticmethod(fits)
    """See `Kernels`."""

    def _new(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(len(like), *(shape or like.shape[1:]), dtype=dtype)

    def _whole(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def _emit(self, op: Operation, reads: Reads = NOTHING) -> None:
        made, states = op.as_op(), None if reads.states is None else States(*places_of(reads.states))
        run = LayerRun(ops=addressof(made), states=address(states), count=1)
        if reads.kv is not None:
            run.kv, run.format = reads.kv.data_ptr(), KV_FORMATS[reads.kv.dtype]
        self._run(byref(run), 1, byref(reads.as_pass(len(op.operands[0]))))

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`. A pass ends with one outside of its program, so it is called as it is."""
        if norm.centred:
            return super().norm(x, norm, dtype)
        x, out = x.contiguous(), torch.empty(x.shape, dtype=dtype)
        size, half = x.shape[-1], dtype is torch.bfloat16
        own = norm.weight.data_ptr(), norm.eps, x.numel() // size, size
        self._library.soothsay_add_norm(x.data_ptr(), None, 0, None, *own, None, out.data_ptr(), half)
        return out

    def route(
        self,
        scores: Tensor,
        experts: RoutingSpec,
        correction: Tensor | None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        scores, routing = scores.contiguous(), Routing.of(experts, correction, scales)
        shape = len(scores), experts.chosen
        shares, chosen = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        self._library.soothsay_route(
            *(scores.data_ptr(), scores.dtype == torch.bfloat16, len(scores), byref(routing)),
            *(shares.data_ptr(), chosen.data_ptr()),
        )
        return shares, chosen

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """See `Kernels`."""
        if NativeLinear.fit(weight):
            return NativeLinear(self, weight, bias, dtype)
        if isinstance(weight, Mixed):  # each part as fast as it can be
            return Parts([self.linear(part, own, dtype) for part, own in weight.with_biases(bias)], dtype)
        return super().linear(weight, bias, dtype)

    def low_rank(self, down: Tensor, up: Tensor) -> nn.Module:
        """See `Kernels`."""
        return LowRank(down, up)

    def table(self, table: QuantizedTable, head: nn.Module | None) -> Table:
        """See `Kernels`."""
        packed = head.table if isinstance(head, NativeLinear) else None
        return table if packed is None else packed

    def record(
        self, blocks: Sequence[DecoderBlock], adapt: Callable[[Any], Any] = lambda ops: ops
    ) -> NativeBlocks:
        """See `Kernels`."""
        return NativeBlocks(self._run, blocks, adapt)

    def pack_rows(
        self, requests: Sequence[Rows], block_size: int, group: int, windows: Windows, device: torch.device
    ) -> Batch:
        """See `LayoutOps`."""
        lay_out = self._loaded.soothsay_lay_out  # in one thread
        return native_batch(lay_out, requests, block_size, group, windows)

    def move(self, parts: Iterable[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `LayoutOps`."""
        places = array("q", [*sources, *targets])
        for part in parts:
            layers, heads, slots, row = part.shape
            size, at = row * part.itemsize, places.buffer_info()[0]
            self._library.soothsay_move(part.data_ptr(), layers * heads, slots, size, at, len(sources))

    def pack(self, integers: Tensor, bits: int, out: Tensor) -> None:
        """Pack `integers` `[rows, in]` uint8 into `out` `[panels, steps, PANEL, 4]`. See `PackedWeight`."""
        self._library.soothsay_pack(integers.data_ptr(), *integers.shape, bits, out.data_ptr())

    def read_rows(self, rows: Tensor, weights: int, out: Tensor) -> None:
        """Read `rows` `[n]` of the weights of a `NativeLinear`, at this address, into `out` `[n, in]`."""
        self._library.soothsay_rows(rows.data_ptr(), len(rows), weights, out.data_ptr())

    def _run(self, *arguments: object) -> None:
        self._library.soothsay_run(*arguments)

    def multiply(self, x: Tensor, weights: int, out: Tensor) -> None:
        """`x` `[M, in]` times the weights of a `NativeLinear`, at this address, into `out` `[M, out]`."""
        bfloat16 = torch.bfloat16
        self._library.soothsay_linear(
            x.data_ptr(), x.dtype is bfloat16, x.shape[0], weights, out.data_ptr(), out.dtype is bfloat16
        )


def load_native(variants: Sequence[str] = VARIANTS) -> NativeKernels | None:
    """The kernels for the first instruction set of `variants` that runs and gains here; None if none does."""
    for variant in variants:
        try:
            kernels = NativeKernels(variant)
        except OSError:
            continue
        if kernels.gains:
            return kernels
    return None
