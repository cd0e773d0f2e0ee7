"""Linear layers by kind: how weights are stored, and which kernel multiplies them.

A kind is a module made from a weight `[out, in]` and a bias; it takes `[M, in]` rows in any float dtype and
gives `[M, out]` in its own `dtype`. Kinds that promise it give each row the same bits for any M.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LinearKind = Callable[[Tensor, Tensor | None], nn.Module]


def normal(*shape: int, std: float) -> Tensor:
    """Normal values; left out on the meta device, where torch would import its compiler to make none."""
    values = torch.empty(shape)
    return values if values.is_meta else values.normal_(std=std)


class Dense(nn.Module):
    """The plain kind, on any device, and the one that trains. Bits of a row may depend on M."""

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
        """Of what it computes."""
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Packed(nn.Module):
    """Weights laid out once for oneDNN's kernels, float32 or bfloat16, on a CPU.

    Streams the weights at the speed of memory, so that sixteen rows cost little more than one, where
    `F.linear` reorders them at every call. A row's bits do not depend on M for M >= 2 (measured, see
    docs/log.md); a single row runs as two.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.dtype = weight.dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        self.bias = bias

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Whether this machine has the kernels."""
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        rows = x.shape[0]
        x = x.to(self.dtype)
        if rows == 1:
            x = x.expand(2, -1).contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out[:rows]
