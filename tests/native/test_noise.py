"""The native hash against stock operations: it decides what is drawn, so every bit counts."""

from __future__ import annotations

import pytest
import torch

from soothsay.engine.sampling import hashed
from soothsay.native import NativeKernels


@pytest.mark.parametrize("width", [1, 7, 16, 8192, 151_937])
def test_the_same_bits_as_stock_operations(kernels: NativeKernels, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    keys = torch.randint(0, 1 << 32, (5, 2), generator=generator)
    keys[0], keys[1] = 0, (1 << 32) - 1
    for tokens in (torch.arange(width)[None], torch.randint(0, 200_000, (5, width), generator=generator)):
        assert torch.equal(kernels.hashed(keys, tokens), hashed(keys, tokens))


def test_the_largest_and_the_smallest_are_within_0_and_1(kernels: NativeKernels) -> None:
    """Tokens whose hashes are the smallest and the largest there are: with keys 0, token 0 has hash 0."""
    keys, tokens = torch.zeros(1, 2, dtype=torch.int64), torch.arange(1 << 20)[None]
    values = kernels.hashed(keys, tokens)
    assert values[0, 0] == 2.0**-33
    assert 0 < values.min() < values.max() < 1
