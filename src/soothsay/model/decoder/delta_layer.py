"""A layer that keeps a state instead of keys and values, in place of attention (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.layer_pass import LayerPass
from soothsay.model.ops.delta_rule import Recurrence
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.state_specs import DeltaSpec


class DeltaLayer(nn.Module):
    """The gated delta rule between two products. See `soothsay.model.ops.delta_rule`."""

    window = None

    def __init__(self, spec: DeltaSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels = spec, kernels
        c, size = spec, in_features or hidden
        self.qkvz: nn.Module = Dense.random(size, c.channels + c.values)
        self.gates: nn.Module = Dense.random(size, 2 * c.value_heads)
        self.recurrence = Recurrence(c)
        self.o: nn.Module = Dense.random(c.values, hidden)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        qkvz, gates = ops.apply(self.qkvz, x), ops.apply(self.gates, x)
        out = ops.delta_rule(qkvz, gates, self.recurrence, at.states, at.batch.strands)
        return ops.apply(self.o, out)

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, gates = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.delta_rule(rows, gates, self.recurrence, states, accepted.strands)
