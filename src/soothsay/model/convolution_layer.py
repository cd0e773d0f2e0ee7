"""A layer that reads the last tokens by a short convolution, in place of attention (LFM2, 2025).

Three products of a row are the gates b and c and an input x. The convolution runs over `b x` of the last
tokens, channel by channel, and c opens its output. A state is the last inputs of the convolution.
"""

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
from soothsay.model.loaded_part import FloatPart
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: LayerMemory | None) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states in `kv` by the rows of committed tokens."""
        b, c, inner = cast(Tensor, self.bcx(x)).chunk(3, dim=-1)
        states = cast(LayerStates | None, kv)
        out = self.kernels.convolve(b * inner, self.taps.weight, states, batch.strands)
        return cast(Tensor, self.o(c.float() * out))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.kernels.convolve(states.journal[accepted.rows], self.taps.weight, states, accepted.strands)
