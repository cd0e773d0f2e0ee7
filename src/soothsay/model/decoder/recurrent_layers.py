"""Layers that keep a state instead of keys and values, in place of attention or beside it.

- The gated delta rule: Qwen3-Next and Qwen3.5.
- Mamba-2: Granite 4, and Falcon-H1 beside attention.
- A short convolution: LFM2 (2025). Three products of a row are the gates b and c and an input x. The
  convolution runs over `b x` of the last tokens, channel by channel, and c opens its output. A state is the
  last inputs of the convolution.
"""

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.decoder_block import LayerPass
from soothsay.model.decoder.norm import Multipliers
from soothsay.model.loaded_part import FloatPart
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.state_ops import Recurrence, StateSpace
from soothsay.model.specs.state_specs import ConvolutionSpec, DeltaSpec, StateSpaceSpec


class DeltaLayer(nn.Module):
    """The gated delta rule between two products. See `soothsay.model.ops.state_ops`."""

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
        out = ops.token_rule(qkvz, gates, self.recurrence, at.states, at.batch.strands)
        return ops.apply(self.o, out)

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, gates = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.token_rule(rows, gates, self.recurrence, states, accepted.strands)


class StateSpaceLayer(nn.Module):
    """Mamba-2 between two products. See `soothsay.model.ops.state_ops`."""

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
        return ops.apply(self.o, ops.token_rule(rows, steps, self.rule, at.states, at.batch.strands))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, steps = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.token_rule(rows, steps, self.rule, states, accepted.strands)


class Taps(FloatPart):
    """The weights of a convolution, random ones at first. Float32."""

    def __init__(self, spec: ConvolutionSpec):
        super().__init__("weight", weight="weight")
        taps = torch.empty(spec.taps, spec.channels)
        self.weight = nn.Parameter(taps if taps.is_meta else taps.normal_(std=spec.taps**-0.5))
        """`[taps, channels]`, the token's own last."""


class ConvolutionLayer(nn.Module):
    """A convolution over the last tokens, between two gates and two products."""

    window = None

    def __init__(self, spec: ConvolutionSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels = spec, kernels
        self.bcx: nn.Module = Dense.random(in_features or hidden, 3 * spec.channels)
        self.taps = Taps(spec)
        self.o: nn.Module = Dense.random(spec.channels, hidden)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        bcx, taps = ops.apply(self.bcx, x), self.taps.weight
        return ops.apply(self.o, ops.gated_convolve(bcx, taps, at.states, at.batch.strands))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.kernels.convolve(states.journal[accepted.rows], self.taps.weight, states, accepted.strands)
