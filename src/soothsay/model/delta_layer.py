"""A layer that keeps a state instead of keys and values, in place of attention (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory, Move
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strand, Strands, marked
from soothsay.model.delta_rule import Recurrence
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense


class DeltaLayer(nn.Module):
    """The gated delta rule between two products. See `soothsay.model.delta_rule`."""

    window = None

    def __init__(self, config: ModelConfig, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        assert config.delta is not None
        self.config, self.kernels = config, kernels
        c, size = config.delta, in_features or config.hidden_size
        self.qkvz: nn.Module = Dense.random(size, c.channels + c.values)
        self.gates: nn.Module = Dense.random(size, 2 * c.value_heads)
        self.recurrence = Recurrence(c, config.norm_eps)
        self.o: nn.Module = Dense.random(c.values, config.hidden_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: LayerMemory | None) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states in `kv` by the rows of committed tokens."""
        states = cast(LayerStates | None, kv)
        out = self.kernels.delta_rule(self.qkvz(x), self.gates(x), self.recurrence, states, batch.strands)
        return cast(Tensor, self.o(out))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, gates = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.delta_rule(rows, gates, self.recurrence, states, accepted.strands)


@dataclass(frozen=True)
class Accepted:
    """The accepted rows of trees."""

    strands: Strands
    rows: tuple[Tensor, Tensor]  # [N] int64 each: the slot of the request, and the node of its tree

    @classmethod
    def of(cls, moves: Sequence[Move], device: torch.device) -> Accepted:
        """The roots and accepted nodes of `moves`. Raises `ValueError` for a request without a state."""
        strands, nodes, slots = list[Strand](), list[int](), list[int]()
        for move in moves:
            if move.state is None:
                raise ValueError("a request without a slot for its state cannot advance")
            own, start = move.nodes, move.start - 1
            marks = marked(move.marks, start, len(own))
            strands.append(Strand(len(nodes), len(own), 0, (), move.state, start == 0, marks))
            nodes += own
            slots += [move.state] * len(own)
        rows = torch.tensor(slots, device=device), torch.tensor(nodes, device=device)
        return cls(Strands(tuple(strands)), rows)
