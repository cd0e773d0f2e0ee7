"""How positions enter attention: rotary embeddings, and queries that grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its long-context scalings."""

    theta: float = 10_000.0
    kind: str = "default"  # or linear, llama3, yarn, longrope, proportional, none (nothing rotates)
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn, longrope: the context of the first training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: derived from `factor`
    mscale: float = 0.0  # yarn, as DeepSeek writes it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, one for each pair
    long_factors: tuple[float, ...] = ()
    context: int = 0  # longrope: the longest context that is served; it chooses between the factors
    share: float = 1.0  # proportional: the share of the pairs that turn; their frequencies are those of all


NO_ROTATION = RopeSpec(kind="none")
"""Nothing rotates."""


@dataclass(frozen=True)
class HeadRotation:
    """How the heads of queries and keys rotate. Layers whose heads rotate equally share a module `Rope`."""

    rope: RopeSpec
    size: int  # dimensions of a head
    rotated: int | None = None  # the first dimensions of a head, which rotate; None: all
    neighbours: bool = False  # as stored, dimensions 2 i and 2 i + 1 of a head rotate together


@dataclass(frozen=True)
class QueryGrowthSpec:
    """Queries are multiplied by `1 + beta ln(1 + floor((position + shift) / span))`."""

    beta: float
    span: int
    max_positions: int  # beyond these, the factor stays
    shift: int = 0
