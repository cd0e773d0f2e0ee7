"""Tables of token embeddings, plain or in integers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """Token embeddings, scaled: float32 rows from a table in any dtype."""

    def __init__(self, weight: Tensor, scale: float):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """`[N] -> [N, hidden]`."""
        rows = self.weight.index_select(0, tokens).float()
        return rows * self.scale if self.scale != 1.0 else rows


class Table(Protocol):
    """A table of which rows are had when they are needed."""

    @property
    def shape(self) -> torch.Size:
        """`[rows, size]`."""

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32: `[n]` int64, their numbers, to `[n, size]`."""


class IntegerEmbedding(Embedding):
    """Token embeddings from a table in integers."""

    def __init__(self, table: Table, scale: float):
        nn.Module.__init__(self)
        self.table, self.scale = table, scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A tensor of the table's shape, without values."""
        return torch.empty(self.table.shape, device="meta")

    def forward(self, tokens: Tensor) -> Tensor:
        """`[N] -> [N, hidden]`."""
        rows = self.table.floats(tokens)
        return rows * self.scale if self.scale != 1.0 else rows
