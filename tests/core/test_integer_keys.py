"""Keys as 16-bit integers: what they keep, how they move, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soothsay.core.cache import KVPool, Move
from soothsay.core.integer_keys import SCALE, integers, kv_bytes, read_values, scores, written


@pytest.mark.parametrize("d", [32, 64, 576])
def test_scores_are_those_of_the_numbers(d: int) -> None:
    torch.manual_seed(0)
    q, keys = torch.randn(2, 5, d), torch.randn(2, 7, d)
    keys[..., 3] *= 100
    rows = written(keys, keys)
    exact = q.double() @ keys.double().transpose(1, 2)
    lengths = q.double().norm(dim=-1)[..., None] * keys.double().norm(dim=-1)[:, None]
    assert ((scores(q, rows[:2]) - exact).abs() / lengths).max() < 1e-4
    assert torch.equal(read_values(rows[2:]), keys.bfloat16().float())


@pytest.mark.parametrize("even", [False, True])
def test_the_largest_sums_fit_into_32_bits(even: bool) -> None:
    row = torch.ones(1024) if even else torch.eye(1024)[5]
    whole, scale = integers(row * 1e6)
    assert whole.long().square().sum() < 2**31
    assert whole.max() > (1000 if even else 32_000)
    assert torch.allclose(whole * scale, row * 1e6, rtol=1e-3)


def test_rows_without_length_are_zeros() -> None:
    whole, _ = integers(torch.tensor([[0.0, 0.0], [1e-20, 1e-20]]))
    assert not whole.any()


def test_accepted_rows_move_with_their_scales() -> None:
    pool = KVPool([(2, 32)], 2, 8, torch.int16, torch.device("cpu"))
    pool.fill()
    (layer,) = pool.layers
    assert isinstance(layer, torch.Tensor)
    assert layer.shape == (2, 16, 32 + SCALE)
    before = layer[:, 13].clone()
    pool.commit([Move(np.array([1, 0]), sources=[5], start=3)])
    assert torch.equal(layer[:, 11], before)


def test_bytes_of_a_token() -> None:
    shapes = [(4, 64), (2, 32), (0, 1)]
    assert kv_bytes(shapes, torch.bfloat16) == 2 * (4 * 64 + 2 * 32)
    assert kv_bytes(shapes, torch.int16) == 2 * (4 * 66 + 2 * 34)
