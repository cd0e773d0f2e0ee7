"""Linear layers with the native product for a few rows."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.machine import mapped_zeros
from soothsay.model.quantized import Quantized

PANEL = 64
"""Number of outputs whose weights are stored together."""

INPUTS = {16: 2, 8: 4, 4: 8}
"""Bits of a weight -> inputs in a step, which is four bytes for each output."""


class Multiplier(Protocol):
    """A library that multiplies packed weights: `soothsay.model.native.kernels.NativeKernels`."""

    name: str

    def multiply(self, x: Tensor, weights: tuple[int | None, ...], out: Tensor) -> None:
        """`x` `[M, in]` times the weights of a `NativeLinear` into `out` `[M, out]`."""


class NativeLinear(nn.Module):
    """bfloat16 weights, or integer weights times activations quantized to 8 bits for each row and group.

    Weights are read once for all rows. A row's bits depend on the row alone, not on other rows or the number
    of threads: each output is summed over its inputs in order, and integer sums are exact.

    Args:
        kernels: multiply.
        weight: `[out, in]` bfloat16, or integers.
        bias: `[out]`.
        dtype: of the output, float32 or bfloat16.
    """

    def __init__(
        self, kernels: Multiplier, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype
    ):
        super().__init__()
        self.kernels, self.dtype, self.name = kernels, dtype, kernels.name
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = self.zeros = None
        if isinstance(weight, Quantized):
            self.bits, self.group_size = weight.bits, weight.group_size
            self.scales = panels(_narrow(weight.scales))
            if weight.zeros is not None:
                self.zeros = panels(weight.zeros)
        else:
            self.bits, self.group_size = 16, self.in_features
        self.weight = pack(weight)
        self.weights = (  # arguments of the library; addresses stay valid with the tensors above
            self.weight.data_ptr(),
            self.bits,
            *(address(self.scales), self.scales is not None and self.scales.dtype == torch.float16),
            *(address(self.zeros), address(self.bias)),
            *(self.in_features, self.out_features, self.group_size),
        )

    @staticmethod
    def fit(weight: Tensor | Quantized, *, bfloat16: bool) -> bool:
        """Whether the library multiplies this weight. `bfloat16`: whether it has that product."""
        if isinstance(weight, Quantized):
            return weight.group_size % 16 == 0
        return bfloat16 and weight.dtype == torch.bfloat16 and weight.shape[1] % 16 == 0

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=self.dtype)
        self.kernels.multiply(x, self.weights, out)
        return out


def _narrow(scales: Tensor) -> Tensor:
    """Scales in half precision if that is exact, as in most formats: fewer bytes to read."""
    half = scales.half()
    return half if torch.equal(half.float(), scales) and half.isfinite().all() else scales


def address(part: Tensor | None) -> int | None:
    """The address of a tensor's first element; None for no tensor."""
    return None if part is None else part.data_ptr()


def panels(values: Tensor) -> Tensor:
    """`[out, n] -> [panels, n, PANEL]`, padded with zeros."""
    values = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def pack(weight: Tensor | Quantized) -> Tensor:
    """Weights in the order in which products read them: `[panels, steps, PANEL, 4]` uint8.

    It packs panel by panel, so that it needs no second copy of the weight.
    """
    values, bits = (weight.values, weight.bits) if isinstance(weight, Quantized) else (weight, 16)
    out, size = values.shape
    steps = size // INPUTS[bits]
    packed = mapped_zeros((-(-out // PANEL), steps, PANEL, 4), torch.uint8, large_pages=True)
    for panel, begin in zip(packed, range(0, out, PANEL), strict=True):
        rows = values[begin : begin + PANEL]
        step = rows.reshape(len(rows), steps, INPUTS[bits])
        if bits == 4:  # inputs 0 to 3 in the low halves of the bytes, 4 to 7 in the high halves
            step = step[..., :4] | step[..., 4:] << 4
        panel[:, : len(rows)] = step.view(torch.uint8).transpose(0, 1)
    return packed
