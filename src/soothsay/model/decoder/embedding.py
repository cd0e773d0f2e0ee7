"""Tables of token embeddings, plain or in integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.model.loaded_part import LoadedPart, StoredWeights, Table


class Embedding(LoadedPart):
    """Token embeddings, scaled: float32 rows from a table in any dtype."""

    def __init__(self, weight: Tensor, scale: float):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """`[N] -> [N, hidden]`."""
        rows = self.weight.index_select(0, tokens).float()
        return rows * self.scale if self.scale != 1.0 else rows

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`. A plain table remains a view of the file: only the rows in use are read."""
        if (rows := weights.blocks(name)) is not None:
            return IntegerEmbedding(rows, self.scale)
        table = weights.tensor(name, "weight", self.weight)
        self.weight = nn.Parameter(table, requires_grad=False)
        if weights.rounds_scale:
            self.scale = float(torch.tensor(self.scale, dtype=table.dtype))
        return self


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
