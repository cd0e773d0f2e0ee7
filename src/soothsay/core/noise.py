"""Noise as a function of a key: Gumbel noise for sampling, the same bits in any batch and on any device.

A key is two 32-bit words, made from a seed and a position. A hash of key and token gives a uniform number, so
the noise of one token can be computed without that of the others.
"""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor

LOW_32_BITS = 0xFFFFFFFF
LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

Numbers = TypeVar("Numbers", int, Tensor)


def noise_key(*words: int) -> tuple[int, int]:
    """A key, two 32-bit words, from a seed, a position and further words (the splitmix64 finalizer)."""
    z = 0
    for word in words:
        z = (z + word + 0x9E3779B97F4A7C15) & LOW_64_BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LOW_64_BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LOW_64_BITS
        z ^= z >> 31
    return z & LOW_32_BITS, z >> 32


def exponential(key: tuple[int, int], token: int) -> float:
    """The exponential variate of a token, in double precision. Its Gumbel noise is minus the logarithm."""
    hashed = _mix(_mix(token * 0x9E3779B1 + key[0]) + key[1])
    return -math.log1p(-(hashed + 0.5) * 2.0**-32)


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """Numbers in (0, 1), `[M, W]` float32, by 32-bit hashing (the "lowbias32" mixer), on any device.

    csrc/noise.cpp computes the same bits.

    Args:
        keys: `[M, 2]` int64, 32 bits each.
        tokens: `[M, W]` or `[1, W]` int64 token ids.
    """
    x = _mix(tokens * 0x9E3779B1 + keys[:, :1])
    x = _mix(x.add_(keys[:, 1:]))
    return x.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _mix(x: Numbers) -> Numbers:
    """Mix the bits of each number; of a tensor in place: allocating costs more than the arithmetic."""
    x &= LOW_32_BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x *= factor
        x &= LOW_32_BITS
    x ^= x >> 16
    return x
