"""The weights of norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """A root mean square norm's weights (Zhang and Sennrich 2019, arXiv 1910.07467). `Kernels` apply it.

    If it is `centred`, it is a layer norm without bias (Ba et al. 2016, arXiv 1607.06450).
    """

    def __init__(self, size: int, eps: float, *, centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.centred = eps, centred


class UnitNorm(nn.Module):
    """A root mean square norm without weights, which are ones."""

    centred = False

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.register_buffer("weight", torch.ones(size, device="cpu"), persistent=False)
        self.weight: Tensor
        self.eps = eps
