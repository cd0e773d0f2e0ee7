"""Noise as a function of a key: Gumbel noise for sampling, the same bits in any batch and on any device.

A key is two 32-bit words, made from a seed and a position. A hash of key and token gives a uniform number, so
the noise of one token can be computed without that of the others. The logarithm consists of operations that
IEEE 754 rounds in one way. csrc/noise.h and model/gpu/source/draws.py compute the same bits.
"""

import math
from typing import TypeVar

import torch
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

    Args:
        keys: `[M, 2]` int64, 32 bits each.
        tokens: `[M, W]` or `[1, W]` int64 token ids.
    """
    x = _mix(tokens * 0x9E3779B1 + keys[:, :1])
    x = _mix(x.add_(keys[:, 1:]))
    return x.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise `-log(-log(1 - u))` of `uniform`, which has the arguments: `[M, W]` float32.

    It is off by at most 1.1e-6.
    """
    u = uniform(keys, tokens)
    rest = 1 - u
    lost = -u - (rest - 1)  # by rounding; exact
    return -logarithm(-(logarithm(rest) + lost / rest))


def logarithm(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal float32 numbers, by the polynomial of fdlibm's `logf`.

    Nothing is fused, so the bits are the same everywhere.
    """
    # x = m * 2^e, with m from about sqrt(1/2) to sqrt(2)
    bits = x.view(torch.int32) + (0x3F800000 - 0x3F3504F3)
    e = ((bits >> 23) - 127).float()
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1
    s = f / (f + 2)
    z = s * s
    w = z * z
    odd = w * (w * 0.24279078841 + 0.40000972152)
    even = z * (w * 0.28498786688 + 0.66666662693)
    half = f * 0.5 * f
    return s * (half + (odd + even)) + e * 9.0580006145e-06 - half + f + e * 6.9313812256e-01


def _mix(x: Numbers) -> Numbers:
    """Mix the bits of each number; of a tensor in place: allocating costs more than the arithmetic."""
    x &= LOW_32_BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x *= factor
        x &= LOW_32_BITS
    x ^= x >> 16
    return x
