"""Configurations of layers that keep a state instead of keys and values, and the sizes of their states."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaConfig:
    """Layers that keep a state instead of keys and values: the gated delta rule (Yang et al. 2024, arXiv
    2412.06464) after a short convolution. See `soothsay.model.delta_rule`.
    """

    layers: tuple[int, ...]  # those that keep a state
    key_heads: int
    value_heads: int  # a multiple of `key_heads`; each has a state
    key_size: int  # dimensions of a head's queries and keys
    value_size: int  # dimensions of a head's values
    taps: int  # tokens that the convolution reads, its own included
    # value head h belongs to key head h mod `key_heads`, not to h divided by the heads of each
    tiled: bool = False

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
    def matrices(self) -> tuple[int, int, int]:
        """Shape of a layer's state: `[H_v, d_k, d_v]`."""
        return self.value_heads, self.key_size, self.value_size

    @property
    def gates(self) -> int:
        """Numbers by which a token changes and keeps the states of all heads."""
        return 2 * self.value_heads


@dataclass(frozen=True)
class ConvolutionConfig:
    """Layers that read the last tokens by a short convolution instead of attention (LFM2, 2025).

    Their state is the convolution's last inputs. See `soothsay.model.convolution_layer`.
    """

    layers: tuple[int, ...]  # those that keep a state
    channels: int  # size of a token's input of the convolution
    taps: int  # tokens that the convolution reads, its own included
    matrices = (0, 0, 0)
    gates = 0


@dataclass(frozen=True)
class StateSpaceConfig:
    """Layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). See `soothsay.model.state_space`."""

    layers: tuple[int, ...]  # those that keep a state
    heads: int  # each has a state
    head_size: int  # dimensions of a head's inputs and outputs
    groups: int  # of heads that share B and C
    state_size: int  # dimensions of B and C
    taps: int  # tokens that the convolution reads, its own included
    normed: bool = True  # outputs are normed
    norm_first: bool = False  # before they are multiplied by their gates
    multipliers: tuple[float, ...] = ()  # Falcon-H1: of gates, x, B, C and steps; empty: all are one
    # Falcon-H1: layers have attention too, and multipliers of the outputs of Mamba-2 and of attention
    beside: tuple[float, float] | None = None

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
    def matrices(self) -> tuple[int, int, int]:
        """Shape of a layer's state: `[H, d_state, d_x]`."""
        return self.heads, self.state_size, self.head_size

    @property
    def gates(self) -> int:
        """Steps of a token, one for each head."""
        return self.heads


StatesConfig = DeltaConfig | ConvolutionConfig | StateSpaceConfig
"""Layers that keep a state instead of keys and values."""


def state_bytes(config: StatesConfig, element_size: int) -> int:
    """Bytes of the state of one request over all layers."""
    inputs = (config.taps - 1) * config.channels * element_size
    return len(config.layers) * (4 * math.prod(config.matrices) + inputs)


def journal_bytes(config: StatesConfig, element_size: int) -> int:
    """Bytes that a node of a draft tree takes over all layers until the tree is verified."""
    return len(config.layers) * (config.channels + config.gates) * element_size
