"""A layer that reads the last tokens by a short convolution, in place of attention (LFM2, 2025).

Three products of a row are the gates b and c and an input x. The convolution runs over `b x` of the last
tokens, channel by channel, and c opens its output. A state is the last inputs of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.kernels import Kernels
from soothsay.model.layer_pass import LayerPass
from soothsay.model.linear import Dense
from soothsay.states_config import ConvolutionConfig


class Taps(nn.Module):
    """The weights of a convolution, random ones at first. Float32."""

    def __init__(self, config: ConvolutionConfig):
        super().__init__()
        taps = torch.empty(config.taps, config.channels)
        self.weight = nn.Parameter(taps if taps.is_meta else taps.normal_(std=config.taps**-0.5))
        """`[taps, channels]`, the token's own last."""


class ConvolutionLayer(nn.Module):
    """A convolution over the last tokens, between two gates and two products."""

    window = None

    def __init__(self, config: ModelConfig, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        assert config.convolution is not None
        self.config, self.kernels = config, kernels
        size = config.convolution.channels
        self.bcx: nn.Module = Dense.random(in_features or config.hidden_size, 3 * size)
        self.taps = Taps(config.convolution)
        self.o: nn.Module = Dense.random(size, config.hidden_size)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        bcx, taps = ops.apply(self.bcx, x), self.taps.weight
        return ops.apply(self.o, ops.gated_convolve(bcx, taps, at.states, at.batch.strands))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.kernels.convolve(states.journal[accepted.rows], self.taps.weight, states, accepted.strands)
