"""Embeddings of tokens, in tables that are plain or in integers, of positions, and those of each layer.

Per-layer embeddings (Gemma 3n, 2025; Gemma 4): each layer reads an embedding of its own for each token. All
layers' embeddings of a token are one row of a table. A projection of the token's usual embedding is added to
it once a pass. A layer gates its part by its own output, and adds the result to the residual stream.
"""

import torch
from torch import Tensor, nn

from soothsay.model.decoder.norm import RMSNorm, build_norm
from soothsay.model.loaded_part import LoadedPart, StoredWeights, Table
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.specs.model_spec import (
    LayerEmbeddingsSpec,
    LayerInputSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
)


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


class Waves(nn.Module):
    """Embeddings of positions that are not learned (Vaswani et al. 2017): sines, then cosines.

    Angles grow by 1 for each row, and shrink 10,000-fold in `waves` numbers of an embedding.
    """

    def __init__(self, rows: int, size: int, waves: float):
        super().__init__()
        places, numbers = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (rows, size // 2))
        angles = places[:, None] * 10_000 ** (-numbers / waves)
        self.register_buffer(
            "table", torch.cat([angles.sin(), angles.cos()], dim=1).float(), persistent=False
        )
        self.table: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        """`[N] -> [N, size]`."""
        return self.table.index_select(0, rows)


class Entry(nn.Module):
    """What rows pass before the first layer: embeddings of positions are added, and a norm may follow."""

    def __init__(self, spec: ModelSpec, kernels: Kernels):
        super().__init__()
        own, size = spec.embedding, spec.hidden_size
        self.kernels, self.places = kernels, own.positions
        self.positions = None if own.positions is None else build_positions(own.positions, size)
        self.embedding_norm = None if own.norm is None else build_norm(own.norm, size)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of tokens `[N, hidden]` float32 at positions `[N]`, as the first layer reads them."""
        if self.positions is not None and (own := self.places) is not None:
            # nodes of a tree may stand beyond the context
            x = x + self.positions((positions + own.shift).clamp(max=own.rows - 1))
        return x if self.embedding_norm is None else self.kernels.norm(x, self.embedding_norm, torch.float32)


def build_positions(spec: PositionsSpec, size: int) -> nn.Module:
    """Embeddings of positions."""
    if spec.waves is not None:
        return Waves(spec.rows, size, spec.waves)
    return Embedding(normal(spec.rows, size, std=0.02), 1.0)


class LayerEmbeddings(nn.Module):
    """What the layers of a model read of each token."""

    def __init__(self, spec: LayerEmbeddingsSpec, model: ModelSpec, kernels: Kernels):
        super().__init__()
        self.kernels, self.size, self.rows = kernels, spec.size, spec.rows
        width = model.num_layers * spec.size
        self.table = Embedding(normal(spec.rows, width, std=0.02), spec.size**0.5)
        self.projection: nn.Module = Dense.random(model.hidden_size, width)
        # published models divide projections by sqrt(hidden), which their norm undoes except for `eps`
        self.norm = RMSNorm(spec.size, model.norm.eps * model.hidden_size)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """`[N]` tokens and their usual embeddings `[N, hidden]`, scaled -> `[layers, N, size]` float32."""
        rows = len(tokens)
        projected = self.projection(embedded).float().reshape(-1, self.size)
        normed = self.kernels.norm(projected, self.norm, torch.float32).view(rows, -1, self.size)
        tokens = torch.where(tokens < self.rows, tokens, 0)
        mixed: Tensor = (normed + self.table(tokens).view(normed.shape)) * 0.5**0.5
        return mixed.transpose(0, 1).contiguous()


class LayerInput(nn.Module):
    """A layer's last part: its embedding of each token, gated by the stream and added to it."""

    def __init__(self, spec: LayerInputSpec, hidden: int, norm: NormSpec, kernels: Kernels):
        super().__init__()
        self.kernels, self.activation = kernels, spec.activation
        self.gate: nn.Module = Dense.random(hidden, spec.size)
        self.projection: nn.Module = Dense.random(spec.size, hidden)
        self.post_norm = RMSNorm(hidden, norm.eps)

    def forward(self, ops: Kernels, x: Tensor, embedding: Tensor | None) -> Tensor:
        """`[N, hidden]` float32 and the layer's `[N, size]` -> `[N, hidden]` float32."""
        return ops.add(x, self._projected(ops, x, embedding), self.post_norm)

    def delta(self, ops: Kernels, x: Tensor, embedding: Tensor | None) -> Tensor:
        """What `forward` adds to `x`."""
        projected = ops.cast(self._projected(ops, x, embedding), torch.float32)
        return ops.norm(projected, self.post_norm, torch.float32)

    def _projected(self, ops: Kernels, x: Tensor, embedding: Tensor | None) -> Tensor:
        assert embedding is not None
        gate = ops.apply(self.gate, x)
        return ops.apply(self.projection, ops.gated(ops.cat([gate, embedding], gate.dtype), self.activation))
