"""Linear layers on a GPU: weights as the kernels read them, and the module that multiplies rows with them."""

import torch
from torch import Tensor, nn

from soothsay.errors import ModelError
from soothsay.model.gpu.integer_weight import IntegerWeight
from soothsay.model.gpu.launching import launch
from soothsay.model.gpu.source import linear as source
from soothsay.model.gpu.tiles import Tile, span_of, tile_for
from soothsay.model.loaded_part import Table
from soothsay.model.ops.linear import Parts
from soothsay.model.weights.quantized import Integers, Mixed, QuantizedRows

FLOATS = torch.bfloat16, torch.float16, torch.float32


def gpu_linear(
    weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype, device: torch.device | str
) -> nn.Module:
    """The layer of a weight; see `GpuLinear`. Parts of different kinds stand beside each other.

    Raises `ModelError` for a weight that does not fit.
    """
    if isinstance(weight, Mixed):
        parts = weight.with_biases(bias)
        return Parts([gpu_linear(part, own, dtype, device) for part, own in parts], dtype)
    if not GpuLinear.fit(weight):
        kind = weight.dtype if isinstance(weight, Tensor) else weight.kind
        raise ModelError(
            f"no kernel of a GPU multiplies a weight {list(weight.shape)} of kind {kind}; inputs come in "
            "multiples of 16, and integers in groups of 16, 32 or 64"
        )
    return GpuLinear(weight, bias, dtype, device)


class GpuLinear(nn.Module):
    """Rows times a constant weight, which is read once for up to 64 rows.

    A row's bits depend on the row alone, not on other rows or the number of rows: products are added in an
    order that the weight's shape decides. Integers that are not split give the bits of the stock layer
    `soothsay.model.ops.linear.Integer`.

    Args:
        weight: `[out, in]` in a float dtype, or integers.
        bias: `[out]`.
        dtype: of the output.
        device: where the weight will be.
    """

    name = "Triton"
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor | QuantizedRows,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
    ):
        super().__init__()
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.to(device, torch.float32))
        self.weight: FloatWeight | IntegerWeight
        if isinstance(weight, Tensor):
            self.weight = FloatWeight(weight, device)
        else:
            self.weight = IntegerWeight(weight, device)
        self.splits = -(-self.in_features // self.weight.span)

    @staticmethod
    def fit(weight: Tensor | Integers) -> bool:
        """Whether the kernels multiply this weight."""
        if isinstance(weight, Mixed):
            return all(GpuLinear.fit(part) for part in weight.parts)
        if isinstance(weight, Tensor):
            return weight.dtype in FLOATS and weight.shape[1] % 16 == 0
        return IntegerWeight.fit(weight)

    @property
    def table(self) -> Table | None:
        """The weight's rows, read one by one, if they are integers: embeddings that are the head as well."""
        return self.weight if isinstance(self.weight, IntegerWeight) else None

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        if self._parts(len(x)) > 1:
            return self.added(self.split_sums(x))
        out = torch.empty(len(x), self.out_features, dtype=self.dtype, device=x.device)
        self._multiply(x, out, self.bias, 1)
        return out

    def split_sums(self, x: Tensor) -> Tensor:
        """The sums of splits, without the bias: `[M, in] -> [parts, M, out]` float32. Perhaps in one part.

        What reads them in place of `added` adds them in order to 0, then the bias, and rounds to `dtype`.
        """
        parts = self._parts(len(x))
        out = torch.empty(parts, len(x), self.out_features, device=x.device)
        self._multiply(x, out, None, parts)
        return out

    def added(self, sums: Tensor) -> Tensor:
        """Add the sums of splits, and the bias: `[parts, M, out] -> [M, out]`."""
        parts, rows, size = sums.shape
        out = torch.empty(rows, size, dtype=self.dtype, device=sums.device)
        launch(source.add_splits, (rows, -(-size // 1024)), sums, self.bias, out, parts, size, BLOCK=1024)
        return out

    def _parts(self, rows: int) -> int:
        """How many programs share a tile: one if there are tiles for all of a device, or no rows."""
        tile = tile_for(self.weight.kind, rows)
        tiles = -(-rows // tile.rows) * -(-self.out_features // tile.outputs)
        return self.splits if 0 < tiles < tile.enough else 1

    def _multiply(self, x: Tensor, out: Tensor, bias: Tensor | None, parts: int) -> None:
        if len(x):
            tile = tile_for(self.weight.kind, len(x))
            grid = -(-len(x) // tile.rows), -(-self.out_features // tile.outputs), parts
            self.weight.multiply(x.contiguous(), out, bias, tile, grid, self.splits // parts)


class FloatWeight(nn.Module):
    """A weight `[out, in]` in bfloat16, float16 or float32, as it is stored."""

    kind = "float"
    values: Tensor

    def __init__(self, weight: Tensor, device: torch.device | str):
        super().__init__()
        self.register_buffer("values", weight.to(device).contiguous())
        self.span = span_of(self.kind, *weight.shape)

    def multiply(
        self,
        x: Tensor,
        out: Tensor,
        bias: Tensor | None,
        tile: Tile,
        grid: tuple[int, int, int],
        each: int,
    ) -> None:
        """Multiply rows `[M, in]` into `out`; see `multiply_floats`."""
        outputs, inputs = self.values.shape
        block = next(size for size in (tile.inputs, 64, 32, 16) if inputs % size == 0)
        launch(
            source.multiply_floats,
            grid,
            *(x.to(self.values.dtype), self.values, bias, out),
            *(len(x), outputs, inputs, self.span, each),
            warps=tile.warps,
            stages=tile.stages,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=block,
        )
