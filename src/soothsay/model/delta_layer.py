"""A layer that keeps a state instead of keys and values, in place of attention (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.delta_rule import Recurrence
from soothsay.model.kernels import Kernels
from soothsay.model.layer_pass import LayerPass
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

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        qkvz, gates = ops.apply(self.qkvz, x), ops.apply(self.gates, x)
        out = ops.delta_rule(qkvz, gates, self.recurrence, at.states, at.batch.strands)
        return ops.apply(self.o, out)

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, gates = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.delta_rule(rows, gates, self.recurrence, states, accepted.strands)
