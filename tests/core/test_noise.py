"""Noise: its error, its ends, and the same bits in PyTorch, one number at a time or many, and in C."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from kernels import SETS, opened
from torch import Tensor

from soothsay.core import noise
from soothsay.model.native.native_kernels import NativeKernels

WORDS = 1 << 32
KEYS = torch.tensor([[123, 456]])

DIGEST = "9c19776b2f7d839d"
"""The digest of all noise of `tokens_of_a_sweep`. If a bit of it changes, the numeric mode does."""


def token_of(hashed: int) -> int:
    """The token that has this hash under `KEYS`: the hash backwards."""

    def unmix(x: int) -> int:
        x ^= x >> 16
        x = x * inverse(0x846CA68B) % WORDS
        x ^= x >> 15 ^ x >> 30
        x = x * inverse(0x7FEB352D) % WORDS
        return x ^ x >> 16

    def inverse(factor: int) -> int:
        return pow(factor, -1, WORDS)

    first, second = map(int, KEYS[0])
    return (unmix(unmix(hashed) - second & WORDS - 1) - first) * inverse(0x9E3779B1) % WORDS


def hashes_of_a_sweep() -> list[int]:
    """Both ends, each power of two with its neighbours, and numbers between."""
    near = (power + i for power, i in itertools.product((1 << n for n in range(33)), range(-3, 4)))
    ends = {*range(600), *range(WORDS - 600, WORDS), *(x for x in near if 0 <= x < WORDS)}
    return sorted(ends | {*np.random.default_rng(0).integers(WORDS, size=3000).tolist()})


def tokens_of_a_sweep() -> Tensor:
    return torch.tensor([[token_of(hashed) for hashed in hashes_of_a_sweep()]])


def test_noise_is_right_to_the_last_bits_over_its_whole_range() -> None:
    hashes = hashes_of_a_sweep()
    found = noise.gumbel(KEYS, tokens_of_a_sweep())[0].double().numpy()
    u = noise.uniform(KEYS, tokens_of_a_sweep())[0].double().numpy()
    assert u == pytest.approx((np.array(hashes) + 0.5) / WORDS, abs=2.0**-24, rel=2.0**-23)
    assert np.abs(found - -np.log(-np.log1p(-u))).max() < 1.1e-6
    assert found.min() > -3


def test_the_bits_of_noise_stay() -> None:
    found = noise.gumbel(KEYS, tokens_of_a_sweep())
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest().startswith(DIGEST)


def test_a_number_alone_has_the_bits_that_it_has_among_others() -> None:
    tokens = tokens_of_a_sweep()
    found = noise.gumbel(KEYS, tokens)
    for place in range(0, tokens.shape[1], 97):
        assert torch.equal(noise.gumbel(KEYS, tokens[:, place : place + 1]), found[:, place : place + 1])


@pytest.mark.parametrize("name", SETS)
def test_the_bits_of_noise_in_c(name: str) -> None:
    ops = opened(NativeKernels, name).sampling
    tokens = tokens_of_a_sweep()
    expected = noise.gumbel(KEYS, tokens)
    assert torch.equal(ops.gumbel(KEYS, tokens), expected)
    for place in range(0, tokens.shape[1], 97):
        assert torch.equal(ops.gumbel(KEYS, tokens[:, place : place + 1]), expected[:, place : place + 1])
    generator = torch.Generator().manual_seed(0)
    keys, tokens = torch.randint(0, WORDS, (500, 2), generator=generator), torch.arange(1999)[None]
    assert torch.equal(ops.gumbel(keys, tokens), noise.gumbel(keys, tokens))
