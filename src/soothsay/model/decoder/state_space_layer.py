"""A layer of Mamba-2, in place of attention (Granite 4) or beside it (Falcon-H1)."""

from __future__ import annotations

from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.layer_pass import LayerPass
from soothsay.model.decoder.norm import Multipliers
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.state_space import StateSpace
from soothsay.model.specs.state_specs import StateSpaceSpec


class StateSpaceLayer(nn.Module):
    """Mamba-2 between two products. See `soothsay.model.ops.state_space`."""

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

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        zxbct = ops.apply(self.zxbct, x)
        if self.multipliers is not None:
            zxbct = ops.scale(zxbct, self.multipliers.row)
        z, xbc, steps = ops.split(zxbct, self.sizes)
        rows = ops.cat([xbc, z], zxbct.dtype)
        return ops.apply(self.o, ops.state_space(rows, steps, self.rule, at.states, at.batch.strands))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, steps = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.state_space(rows, steps, self.rule, states, accepted.strands)
