"""A layer that reads the last tokens by a short convolution, in place of attention (LFM2, 2025).

Three products of a row are the gates b and c and an input x. The convolution runs over `b x` of the last
tokens, channel by channel, and c opens its output. A state is the last inputs of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.layer_pass import LayerPass
from soothsay.model.loaded_part import FloatPart
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.state_specs import ConvolutionSpec


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
