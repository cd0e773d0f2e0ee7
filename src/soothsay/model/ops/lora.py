"""Adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): requests of one pass may have different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.model.ops.kernels import Kernels


class LowRank(nn.Module):
    """What an adapter adds to the outputs of a linear layer: two thin products.

    Args:
        down: a row-invariant linear layer, `[N, in] -> [N, rank]` float32.
        up: another one, `[N, rank] -> [N, out]` float32. It has the scale of the adapter.
    """

    def __init__(self, down: nn.Module, up: nn.Module):
        super().__init__()
        self.down, self.up = down, up

    def forward(self, x: Tensor) -> Tensor:
        """`[N, in] -> [N, out]` float32."""
        return cast(Tensor, self.up(self.down(x)))


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter of a model."""

    digest: str
    """Of its files."""
    parts: Mapping[nn.Module, LowRank]
    """By the linear layer of the model."""


class AdapterOps:
    """Operations of a pass in which some rows have adapters. They are `Kernels` to layers.

    A linear layer adds to each row what the row's adapter adds, in float32, and rounds the sum to its own
    element type. Rows without an adapter keep the bits of `kernels`.

    Args:
        kernels: do all the rest.
        rows: adapters with their rows of the pass.
    """

    def __init__(self, kernels: Kernels, rows: Sequence[tuple[Adapter, slice | Tensor]]):
        self._kernels, self._rows = kernels, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `Kernels`."""
        out = self._kernels.apply(layer, x)
        for adapter, rows in self._rows:
            if (part := adapter.parts.get(layer)) is not None:
                out[rows] = (out[rows].float() + part(x[rows])).to(out.dtype)
        return out


def operations(kernels: Kernels, adapters: Mapping[str, Adapter], requests: Sequence[Rows]) -> Kernels | None:
    """The operations of a pass over the rows of `requests`; None: no request has an adapter."""
    own = dict[str, list[range]]()
    if adapters:
        firsts = accumulate((request.num_rows for request in requests), initial=0)
        for request, first in zip(requests, firsts, strict=False):
            if request.adapter is not None:
                own.setdefault(request.adapter, []).append(range(first, first + request.num_rows))
    if not own:
        return None
    return cast(Kernels, AdapterOps(kernels, [(adapters[name], _places(own[name])) for name in own]))


def _places(ranges: Sequence[range]) -> slice | Tensor:
    """Some rows of a pass, as an index of its tensors."""
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return torch.tensor([*chain(*ranges)], device="cpu")
