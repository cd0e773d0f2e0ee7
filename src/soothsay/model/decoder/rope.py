"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with scaling for longer contexts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.model.specs.attention_spec import HeadRotation, QueryGrowthSpec, RopeSpec

MIN_TABLE, MAX_TABLE = 1024, 1 << 17
"""Positions whose cosines and sines are kept, at first and at most. To compute them takes a pass longer."""


class Rope(nn.Module):
    """Computes the cosines and sines of positions, once a pass.

    If only some dimensions of a head rotate, the last dimensions of each half turn by 0.
    """

    def __init__(self, rotation: HeadRotation):
        super().__init__()
        config, rotary_dim = rotation.rope, rotation.rotated or rotation.size
        still = (rotation.size - rotary_dim) // 2  # dimensions of each half
        inverse = F.pad(inverse_frequencies(config, rotary_dim), (0, still))
        self.register_buffer("signed", torch.cat([-inverse, inverse]), persistent=False)
        self.signed: Tensor  # [d] radians per position, the first half negated
        scale = torch.full((rotary_dim // 2,), attention_scale(config), device="cpu")
        self.is_scaled = attention_scale(config) != 1.0
        self.register_buffer("scale", F.pad(scale, (0, still), value=1.0).repeat(2), persistent=False)
        self.scale: Tensor  # [d] factors of cosines and sines
        self._table = torch.empty(0), torch.empty(0)  # of the first positions

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[N]` positions -> cosines and sines, `[N, 1, d]` each. The first half of the sines is negated."""
        if positions.device.type != "cpu" or (count := int(positions.max()) + 1) > MAX_TABLE:
            return self._turns(positions)
        cos, sin = self.table(count)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def table(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `count` positions, and some more."""
        if len(self._table[0]) < count:
            self._table = self._turns(torch.arange(max(MIN_TABLE, 1 << (count - 1).bit_length())))
        return self._table

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None, None] * self.signed
        cos, sin = angles.cos(), angles.sin()
        return (cos * self.scale, sin * self.scale) if self.is_scaled else (cos, sin)


class QueryGrowth(nn.Module):
    """Factors of queries that grow with the position, so that attention stays sharp in long contexts.

    See `QueryGrowthSpec` (Llama 4, Ministral 3). All factors are computed once, so that a position's factor
    has the same bits in any batch.
    """

    def __init__(self, spec: QueryGrowthSpec):
        super().__init__()
        self.span, self.shift = spec.span, spec.shift
        spans = (spec.max_positions + spec.shift) // spec.span + 1
        factors = [1 + spec.beta * math.log1p(n) for n in range(spans)]
        self.register_buffer("factors", torch.tensor(factors, device="cpu"), persistent=False)
        self.factors: Tensor  # [spans]


def inverse_frequencies(config: RopeSpec, head_dim: int) -> Tensor:
    """`[d / 2]` radians per position, where d are the dimensions that rotate."""
    if config.kind == "none":
        return torch.zeros(head_dim // 2, device="cpu")
    inverse = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    if config.kind == "proportional":  # Gemma 4: the slow pairs do not turn
        turning = int(config.share * head_dim // 2)
        return torch.where(torch.arange(head_dim // 2, device="cpu") < turning, inverse / config.factor, 0.0)
    if config.kind == "linear":  # Chen et al. 2023, arXiv 2306.15595
        return inverse / config.factor
    if config.kind == "llama3":  # Llama 3.1: stretch long waves, keep short ones, blend between
        turns = config.original_max_positions * inverse / (2 * math.pi)
        if config.low_freq_factor == config.high_freq_factor:  # Llama 4: nothing is between
            return torch.where(turns < config.low_freq_factor, inverse / config.factor, inverse)
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
    if config.kind == "longrope":  # Ding et al. 2024, arXiv 2402.13753
        is_long = config.context > config.original_max_positions
        return inverse / torch.tensor(config.long_factors if is_long else config.short_factors, device="cpu")
    return inverse


def _yarn_dimension(config: RopeSpec, head_dim: int, turns: float) -> float:
    """The dimension that makes `turns` full turns over the original context."""
    positions = config.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(positions) / (2 * math.log(config.theta))


def attention_scale(config: RopeSpec) -> float:
    """Factor of cosines and sines: yarn and longrope sharpen attention for longer contexts."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        longer = math.log(max(config.factor, 1.0)) / math.log(config.original_max_positions)
        return math.sqrt(1 + longer)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
