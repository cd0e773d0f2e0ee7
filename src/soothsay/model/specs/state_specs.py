"""Specs of parts that keep a state instead of keys and values, or beside them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from soothsay.core.state_shape import StateShape
from soothsay.model.specs.attention_spec import AttentionSpec


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) after a short convolution.

    See `soothsay.model.ops.state_ops`.
    """

    key_heads: int
    value_heads: int  # a multiple of `key_heads`; each has a state
    key_size: int  # dimensions of a head's queries and keys
    value_size: int  # dimensions of a head's values
    taps: int  # tokens that the convolution reads, its own included
    norm_eps: float
    # value head h belongs to key head h mod `key_heads`, not to h divided by the heads of each
    tiled: bool = False
    # modules whose rows checkpoints store key head by key head; see `soothsay.model.weights.tensor_names`
    by_key_head: tuple[str, ...] = ()

    opening: ClassVar = "silu"
    """The function of gates of outputs."""

    @property
    def decays(self) -> int:
        """Decays of a head's state: one, or one for each dimension of its keys."""
        return 1

    @property
    def keys(self) -> int:
        """Size of all keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Size of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Size of a token's input of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> StateShape:
        """Matrices `[H_v, d_k, d_v]`, changed by one gate for each head and kept by the others."""
        matrices = self.value_heads, self.key_size, self.value_size
        return StateShape(self.channels, self.taps, matrices, self.value_heads * (1 + self.decays))

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        products = hidden * (self.channels + 2 * self.values + 2 * self.value_heads)
        return products + self.taps * self.channels


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(DeltaSpec):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692). Its gates come by way of few numbers."""

    rank: int  # of these numbers

    opening: ClassVar = "sigmoid"

    @property
    def decays(self) -> int:
        """See `DeltaSpec`."""
        return self.key_size

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        rows = self.channels + self.values + 2 * self.rank + self.value_heads
        return hidden * rows + self.rank * (self.keys + self.values) + self.taps * self.channels


@dataclass(frozen=True)
class ConvolutionSpec:
    """A short convolution over the last tokens (LFM2, 2025), whose last inputs are the state."""

    channels: int  # size of a token's input of the convolution
    taps: int  # tokens that the convolution reads, its own included

    @property
    def state(self) -> StateShape:
        """It has no matrices."""
        return StateShape(self.channels, self.taps)

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        return (4 * hidden + self.taps) * self.channels


@dataclass(frozen=True)
class StateSpaceSpec:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). See `soothsay.model.ops.state_ops`."""

    heads: int  # each has a state
    head_size: int  # dimensions of a head's inputs and outputs
    groups: int  # of heads that share B and C
    state_size: int  # dimensions of B and C
    taps: int  # tokens that the convolution reads, its own included
    norm_eps: float
    normed: bool = True  # outputs are normed
    norm_first: bool = False  # before they are multiplied by their gates
    multipliers: tuple[float, ...] = ()  # Falcon-H1: of gates, x, B, C and steps; empty: all are one

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of a token's gates, x, B, C and steps."""
        shared = self.groups * self.state_size
        return self.size, self.size, shared, shared, self.heads

    @property
    def group(self) -> int:
        """Heads in a group."""
        return self.heads // self.groups

    @property
    def size(self) -> int:
        """Size of the outputs of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Size of a token's input of the convolution: x, B and C."""
        return self.size + 2 * self.groups * self.state_size

    @property
    def state(self) -> StateShape:
        """Matrices `[H, d_state, d_x]`, changed by a step for each head."""
        matrices = self.heads, self.state_size, self.head_size
        return StateShape(self.channels, self.taps, matrices, self.heads)

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        return hidden * (2 * self.size + self.channels + self.heads) + self.taps * self.channels


@dataclass(frozen=True)
class SelectiveSpec:
    """Mamba (Gu and Dao 2023, arXiv 2312.00752). See `soothsay.model.ops.state_ops`."""

    size: int  # channels, each with a state
    state_size: int  # dimensions of a channel's state, and of B and C
    rank: int  # numbers that steps are made of
    taps: int  # tokens that the convolution reads, its own included
    norm_eps: float | None = None  # of norms of these numbers, of B and of C; None: they are not normed
    learned: bool = False  # Jamba: these norms have weights

    @property
    def width(self) -> int:
        """Channels whose states lie together."""
        return math.gcd(self.size, 128)

    @property
    def state(self) -> StateShape:
        """Matrices `[size / width, d_state, width]`, changed by steps, B and C."""
        matrices = self.size // self.width, self.state_size, self.width
        return StateShape(self.size, self.taps, matrices, self.size + 2 * self.state_size)

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        inner = 2 * self.rank + 3 * self.state_size + self.taps
        return self.size * (3 * hidden + inner)


@dataclass(frozen=True)
class BesideStatesSpec:
    """Attention and Mamba-2 over the same rows, whose outputs are multiplied and added (Falcon-H1, 2025)."""

    attention: AttentionSpec
    states: StateSpaceSpec
    of_states: float  # multiplier of Mamba-2's outputs
    of_attention: float
