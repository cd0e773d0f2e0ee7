"""A layer of Mamba-2, in place of attention (Granite 4) or beside it (Falcon-H1)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.core.states import LayerStates
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.norm import Multipliers
from soothsay.model.specs.state_specs import StateSpaceSpec
from soothsay.model.state_space import StateSpace


class StateSpaceLayer(nn.Module):
    """Mamba-2 between two products. See `soothsay.model.state_space`."""

    window = None

    def __init__(self, spec: StateSpaceSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels, c = spec, kernels, spec
        self.sizes = [c.size, c.channels, c.heads]
        self.zxbct: nn.Module = Dense.random(in_features or hidden, sum(self.sizes))
        """Gates of outputs, then inputs of the convolution, then steps."""
        self.multipliers = Multipliers(c.multipliers, c.parts) if c.multipliers else None
        self.rule = StateSpace(c)
        self.o: nn.Module = Dense.random(c.size, hidden)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: LayerMemory | None) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states in `kv` by the rows of committed tokens."""
        zxbct = cast(Tensor, self.zxbct(x))
        if self.multipliers is not None:
            zxbct = self.multipliers(zxbct)
        z, xbc, steps = torch.split(zxbct, self.sizes, dim=1)
        states, rows = cast(LayerStates | None, kv), torch.cat([xbc, z], dim=1)
        out = self.kernels.state_space(rows, steps, self.rule, states, batch.strands)
        return cast(Tensor, self.o(out))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, steps = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.state_space(rows, steps, self.rule, states, accepted.strands)
