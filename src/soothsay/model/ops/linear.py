"""Linear layers, by how weights are stored and which kernel multiplies them.

A layer is a module made from a weight `[out, in]` and a bias. It takes rows `[M, in]` in any float dtype and
returns `[M, out]` in its own `dtype`. A row-invariant layer computes the same bits of a row for any M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.model.loaded_part import LoadedPart, StoredWeights
from soothsay.model.weights.quantized import Integers, Mixed, Quantized


def normal(*shape: int, std: float) -> Tensor:
    """Normal values. On the meta device nothing is drawn, since torch would import its compiler."""
    values = torch.empty(shape)
    return values if values.is_meta else values.normal_(std=std)


class Dense(LoadedPart):
    """Plain weights, on any device and trainable. Bits of a row may depend on M."""

    name = "in plain PyTorch"

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def random(cls, in_features: int, out_features: int, *, bias: bool = False) -> Dense:
        """Normal weights of standard deviation `1 / sqrt(in)`, zero bias."""
        weight = normal(out_features, in_features, std=1 / math.sqrt(in_features))
        return cls(weight, torch.zeros(out_features) if bias else None)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the output."""
        return self.weight.dtype

    @property
    def out_features(self) -> int:
        """Numbers of an output row."""
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`. The kernels' own layer takes its place."""
        return weights.linear(name, self.weight, self.bias)


def padded_rows(rows: int) -> int:
    """The number of rows that run in place of `rows`: at least 2, and above 16 one of a few."""
    step = 1 if rows <= 16 else 8 if rows <= 64 else 16 if rows <= 256 else 64
    return max(2, -(-rows // step) * step)


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions that multiply bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported())


class Packed(nn.Module):
    """Weights packed once for oneDNN's kernels, in float32, on a CPU. `dtype` is that of the weight.

    `F.linear` would reorder the weights in each call. The product reads them at the speed of memory, so
    sixteen rows cost little more than one. Row-invariant: bits do not depend on M for M >= 2 (measured, see
    docs/log.md), and a single row runs as two. oneDNN's products of bfloat16 are not, so a weight in bfloat16
    is multiplied in float32 too, and takes twice the memory.

    oneDNN keeps code and memory for each number of rows that it has seen, up to 0.6 MB for each product of a
    small model. So rows are padded to a few numbers.
    """

    name = "packed for oneDNN"

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.dtype, self.out_features = weight.dtype, len(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 16)
        self.bias = None if bias is None else bias.float()

    @staticmethod
    def available() -> bool:
        """Whether this machine has the kernels."""
        return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        rows = x.shape[0]
        x = x.float()
        if missing := padded_rows(rows) - rows:
            x = F.pad(x, (0, 0, 0, missing))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out[:rows].to(self.dtype)


def keeps_bits() -> bool:
    """Whether bits of oneDNN's float32 products were found not to depend on the number of rows here."""
    return Packed.available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class InBlocks(nn.Module):
    """A layer that runs `ROWS` rows at a time, the last ones padded, so that all products have one shape.

    For products whose bits may depend on the number of rows.
    """

    ROWS = 16

    def __init__(self, layer: Dense | Packed):
        super().__init__()
        self.layer, self.name, self.dtype = layer, layer.name, layer.dtype
        self.out_features = layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        blocks = torch.split(F.pad(x, (0, 0, 0, -len(x) % self.ROWS)), self.ROWS)
        return torch.cat([self.layer(block) for block in blocks])[: len(x)]


class Integer(nn.Module):
    """Integer weights times activations that are quantized to 8 bits for each row and group of inputs.

    Stock operations, with a byte for each weight. Row-invariant: sums of integers are exact, and groups are
    added in order. It takes a product for each group, so native kernels are much faster.
    """

    name = "in stock operations, which are slow at integers"

    def __init__(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        weight = weight.in_small_groups()
        self.dtype, self.bias, self.group_size = dtype, bias, weight.group_size
        self.out_features = weight.shape[0]
        scales, minimums = weight.factors()
        integers = weight.integers().view(*scales.shape, -1)
        zeros = integers.amin(-1) + 128  # bring the integers of a group into 8 bits
        centred = (integers - zeros[..., None]).to(torch.int8)
        # [groups, group_size, out]; `contiguous` leaves a single row the strides of a column
        self.weight = centred.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        self.scales = scales.t().contiguous()  # [groups, out]
        self.zeros = -zeros.t().int()  # [groups, out]
        self.minimums = None if minimums is None else minimums.t().contiguous()  # [groups, out]

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        values, scales = quantize_rows(x, self.group_size)
        out = torch.zeros(len(x), self.scales.shape[1], device=x.device)
        for g, weight in enumerate(self.weight):
            row = values[:, g].contiguous()
            total = row.sum(-1, keepdim=True, dtype=torch.int32)
            sums = torch._int_mm(row, weight) - total * self.zeros[g]
            if self.minimums is not None:
                out += self.minimums[g] * (scales[:, g, None] * total)
            out += sums * (self.scales[g] * scales[:, g, None])
        return (out if self.bias is None else out + self.bias.float()).to(self.dtype)


class Parts(nn.Module):
    """Layers with the same inputs, whose outputs stand beside each other."""

    def __init__(self, parts: Sequence[nn.Module], dtype: torch.dtype):
        super().__init__()
        self.parts, self.dtype = nn.ModuleList(parts), dtype
        self.out_features = sum(cast(int, part.out_features) for part in parts)

    @property
    def name(self) -> str:
        """See the parts."""
        return cast(str, self.parts[0].name)

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return torch.cat([part(x).to(self.dtype) for part in self.parts], -1)


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantize activations to integers from -127 to 127, with a scale for each row and group.

    `[M, in] -> [M, groups, group_size]` int8 and `[M, groups]` float32.
    """
    groups = x.float().view(len(x), x.shape[1] // group_size, group_size)
    largest = groups.abs().amax(-1)
    # torch divides a number by a tensor through its reciprocal: two roundings
    end = torch.full_like(largest, 127.0)
    inverse = torch.where(largest > 0, end / largest, 0.0)
    return (groups * inverse[..., None]).round().to(torch.int8), largest / 127.0


def stock_linear(weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """The fastest layer in stock operations; on a CPU, a row-invariant one."""
    if isinstance(weight, Tensor):
        if weight.device.type != "cpu":
            return Dense(weight, bias)
        layer = Packed(weight, bias) if Packed.available() else Dense(weight, bias)
        return layer if keeps_bits() else InBlocks(layer)
    if isinstance(weight, Mixed):
        return Parts([stock_linear(part, own, dtype) for part, own in weight.with_biases(bias)], dtype)
    return Integer(weight.rows(0, weight.shape[0]), bias, dtype)
