"""Adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): requests of one pass may have different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.model.ops.kernels import Kernels, RecordedBlocks, StockKernels


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter of a model."""

    digest: str
    """Identifies its files."""
    parts: Mapping[nn.Module, nn.Module]
    """What it adds, as `Kernels.low_rank` makes it, by the linear layer of the model."""


class AdaptedRows(NamedTuple):
    """The adapters of the rows of a pass."""

    adapters: Adapters
    numbers: Tensor
    """`[N]` int64, of adapters; -1: a row has none."""


class Adapters:
    """The adapters of a model, numbered in their order.

    Args:
        named: by the names that requests give.
        kernels: of the model.
        blocks: of the model. They are recorded once, with all adapters.
    """

    def __init__(self, named: Mapping[str, Adapter], kernels: Kernels, blocks: Sequence[Any]):
        self.named, self._numbers = named, {name: number for number, name in enumerate(named)}
        adapted = dict.fromkeys(layer for one in named.values() for layer in one.parts)
        self._parts = {layer: [one.parts.get(layer) for one in named.values()] for layer in adapted}
        self.recorded: RecordedBlocks | None = None
        """Runs the blocks of a pass in which rows have adapters; None: the kernels record nothing."""
        if named:
            self.recorded = kernels.record(blocks, self.over)

    def of_rows(self, requests: Sequence[Rows]) -> AdaptedRows | None:
        """The adapters of a pass over the rows of `requests`; None: no row has one."""
        if not self.named or all(request.adapter is None for request in requests):
            return None
        own = [-1 if request.adapter is None else self._numbers[request.adapter] for request in requests]
        return AdaptedRows(self, torch.from_numpy(np.repeat(own, [request.num_rows for request in requests])))

    def over(self, kernels: Kernels, numbers: Tensor | None = None) -> Kernels:
        """Operations of a pass in which rows have adapters; for `numbers` see `Kernels.adapt`."""
        return cast(Kernels, AdapterOps(kernels, self._parts, numbers))


class AdapterOps:
    """Operations whose linear layers add what the adapters of rows add. They are `Kernels` to layers.

    A row's bits depend on the row and its adapter. Rows without one keep the bits of `kernels`.

    Args:
        kernels: do all the rest.
        parts: what adapters add, by number, by the linear layer of the model.
        numbers: see `Kernels.adapt`.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts: Mapping[nn.Module, Sequence[nn.Module | None]],
        numbers: Tensor | None,
    ):
        self._kernels, self._parts, self._numbers = kernels, parts, numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `Kernels`."""
        out, parts = self._kernels.apply(layer, x), self._parts.get(layer)
        return out if parts is None else self._kernels.adapt(out, x, parts, self._numbers)


NO_ADAPTERS = Adapters({}, StockKernels(), ())
"""The adapters of a model that has none."""
