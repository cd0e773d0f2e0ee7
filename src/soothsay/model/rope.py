"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with scaling for longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from soothsay.config import RopeConfig


class Rope(nn.Module):
    """Computes the cosines and sines of positions, once a pass."""

    def __init__(self, config: RopeConfig, head_dim: int):
        super().__init__()
        self.scale = attention_scale(config)
        inverse = inverse_frequencies(config, head_dim)
        self.register_buffer("signed", torch.cat([-inverse, inverse]), persistent=False)
        self.signed: Tensor  # [d] radians per position, the first half negated

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[N]` positions -> cosines and sines, `[N, 1, d]` each. The first half of the sines is negated."""
        angles = positions.float()[:, None, None] * self.signed
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1.0 else (cos * self.scale, sin * self.scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[N, H, d]`. Dimension i is paired with i + d/2."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """`[d / 2]` radians per position."""
    inverse = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    if config.kind == "linear":  # Chen et al. 2023, arXiv 2306.15595
        return inverse / config.factor
    if config.kind == "llama3":  # Llama 3.1: stretch long waves, keep short ones, blend between
        turns = config.original_max_positions * inverse / (2 * math.pi)
        keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        return torch.lerp(inverse / config.factor, inverse, keep.clamp(0, 1))
    if config.kind == "yarn":  # Peng et al. 2023, arXiv 2309.00071
        low, high = (
            _yarn_dimension(config, head_dim, turns) for turns in (config.beta_fast, config.beta_slow)
        )
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2, device="cpu").float() - low) / max(high - low, 1e-3)
        return torch.lerp(inverse, inverse / config.factor, ramp.clamp(0, 1))
    return inverse


def _yarn_dimension(config: RopeConfig, head_dim: int, turns: float) -> float:
    """The dimension that makes `turns` full turns over the original context."""
    return (
        head_dim
        * math.log(config.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(config.theta))
    )


def attention_scale(config: RopeConfig) -> float:
    """Factor of cosines and sines: yarn sharpens attention for longer contexts."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
