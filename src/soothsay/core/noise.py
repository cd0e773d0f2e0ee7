"""Noise as a function of a key: Gumbel noise for sampling, the same bits in any batch and on any device.

A key is two 32-bit words, made from a seed and a position. A hash of key and token gives a uniform number, so
the noise of one token can be computed without that of the others.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from torch import Tensor

LOW_32_BITS = 0xFFFFFFFF
LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

Numbers = TypeVar("Numbers", int, Tensor)


class SamplingKernels(Protocol):
    """The operations of sampling that depend on the device. `soothsay.model.kernels.Kernels` has them."""

    draws_by_race: bool
    """Whether `largest`, `race` and `mass_before` are faster than the scores of all tokens, and the first of
    equal numbers comes first in all three."""

    def uniform(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """Uniform numbers, to the bit those of the function `uniform`."""

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The largest numbers of each row, `[M, min(count, V)]` values and places, the largest first.

        Args:
            x: `[M, V]` float32.
            count: how many are wanted in each row.
            factors: `[M]` float32 above 0. With them, values are log-softmax of each row times its factor.
        """

    def argmax(self, x: Tensor) -> Tensor:
        """The place of each row's largest number, the first of equal ones: `[M, V]` float32 -> `[M]`."""

    def race(self, x: Tensor, factors: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The tokens with the largest `factor * number + noise`, without the noise of the others.

        Args:
            x: `[M, V]` float32.
            factors: `[M]` float32 above 0.
            keys: `[M, 2]` int64, of the noise that `gumbel` gives.
            count: how many are wanted in each row.

        Returns:
            `[M, min(count, V)]` values and tokens, the largest first. Values may be off by some units in the
            last place. Minus infinity may be at any token.
        """

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """The probability of all tokens that are likelier than one of them, in each row.

        Args:
            x: `[M, V]` float32.
            factors: `[M]` float32 above 0. Probabilities are the softmax of `factor * x`.
            tops: `[M]`, the largest number of each row.
            floors: `[M]`; tokens with numbers below have probability 0.
            places: `[M]` int64, the token of each row, whose number is at least the floor. Equally likely
                tokens come in order of their ids.

        Returns:
            `[M]` float32.
        """


def noise_key(*words: int) -> tuple[int, int]:
    """A key, two 32-bit words, from a seed, a position and further words (the splitmix64 finalizer)."""
    z = 0
    for word in words:
        z = (z + word + 0x9E3779B97F4A7C15) & LOW_64_BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LOW_64_BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LOW_64_BITS
        z ^= z >> 31
    return z & LOW_32_BITS, z >> 32


def gumbel(keys: Tensor, tokens: Tensor, kernels: SamplingKernels) -> Tensor:
    """Standard Gumbel noise of each token under each key.

    Args:
        keys: `[M, 2]` int64, 32 bits each.
        tokens: `[M, W]` or `[1, W]` int64 token ids.
        kernels: hash on the device of `keys` and `tokens`.

    Returns:
        `[M, W]` float32.
    """
    # the exponential near 0 decides, so its precision is kept there
    return kernels.uniform(keys, tokens).neg_().log1p_().neg_().log_().neg_()


def exponential(key: tuple[int, int], token: int) -> float:
    """The exponential variate of a token, in double precision. Its Gumbel noise is minus the logarithm."""
    hashed = _mix(_mix(token * 0x9E3779B1 + key[0]) + key[1])
    return -math.log1p(-(hashed + 0.5) * 2.0**-32)


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """Numbers in (0, 1), `[M, W]` float32, by 32-bit hashing (the "lowbias32" mixer), on any device.

    Arguments are those of `gumbel`. csrc/noise.cpp computes the same bits.
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
