"""The weights of norms."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """A root mean square norm's weights (Zhang and Sennrich 2019, arXiv 1910.07467). `Kernels` apply it.

    If it is `centred`, it is a layer norm without bias (Ba et al. 2016, arXiv 1607.06450).
    """

    def __init__(self, size: int, eps: float, *, centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.centred = eps, centred
