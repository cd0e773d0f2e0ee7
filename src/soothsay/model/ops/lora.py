"""Adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): requests of one pass may have different ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.model.ops.kernels import Kernels, RecordedBlocks


class LowRank(nn.Module):
    """What an adapter adds to the outputs of a linear layer: two thin products.

    Args:
        down: a row-invariant linear layer, `[N, in] -> [N, rank]` float32.
        up: another one, `[N, rank] -> [N, out]` float32. It has the scale of the adapter.
    """

    def __init__(self, down: nn.Module, up: nn.Module):
        super().__init__()
        self.down, self.up = down, up


Parts = Mapping[nn.Module, LowRank]
"""What an adapter adds, by the linear layer of the model."""

Places = slice | Tensor
"""Some rows of a pass, as an index of its tensors."""


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter of a model."""

    digest: str
    """Identifies its files."""
    parts: Parts
    recorded: RecordedBlocks | None
    """Runs the blocks of a pass whose rows all have this adapter; None: the kernels record nothing."""


class AdapterOps:
    """Operations of a pass in which rows have adapters. They are `Kernels` to layers.

    A linear layer adds to each row what the row's adapter adds, in float32, and rounds the sum to its own
    element type. So a row's bits depend on the row and its adapter. Other rows keep the bits of `kernels`.

    Args:
        kernels: do all the rest.
        adapters: parts of adapters, and their rows; None: all rows.
    """

    def __init__(self, kernels: Kernels, adapters: Sequence[tuple[Parts, Places | None]]):
        self._kernels, self._adapters = kernels, adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `Kernels`."""
        out = self._kernels.apply(layer, x)
        for parts, rows in self._adapters:
            if (part := parts.get(layer)) is None:
                continue
            if rows is None:
                return self._sum(out, part, x)
            out[rows] = self._sum(out[rows], part, x[rows])
        return out

    def _sum(self, out: Tensor, part: LowRank, x: Tensor) -> Tensor:
        ops = self._kernels
        added = ops.apply(part.up, ops.apply(part.down, x))
        return ops.cast(ops.blend(out, 1.0, added, 1.0), out.dtype)


def with_adapters(kernels: Kernels, *adapters: tuple[Parts, Places | None]) -> Kernels:
    """See `AdapterOps`."""
    return cast(Kernels, AdapterOps(kernels, adapters))


def rows_of_adapters(requests: Sequence[Rows]) -> dict[str, Places | None]:
    """The rows of each adapter in a pass over the rows of `requests`; None: all rows of the pass."""
    own, first = dict[str, list[range]](), 0
    for request in requests:
        rows = range(first, first := first + request.num_rows)
        if request.adapter is not None:
            own.setdefault(request.adapter, []).append(rows)
    if len(own) == 1 and sum(map(len, *own.values())) == first:
        return dict.fromkeys(own)
    return {name: _places(ranges) for name, ranges in own.items()}


def _places(ranges: Sequence[range]) -> Places:
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return torch.tensor([*chain(*ranges)], device="cpu")
