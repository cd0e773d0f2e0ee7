"""Rows of integers in a KV pool: what they keep, how they move, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soothsay.core.cache import (
    KVPool,
    Move,
    integers,
    key_products,
    kv_bytes,
    read_values,
    row_size,
    written,
)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.int16, 1e-4), (torch.int8, 0.02)], ids=str)
@pytest.mark.parametrize("d", [32, 64, 576])
def test_scores_are_those_of_the_numbers(d: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    q, keys = torch.randn(2, 5, d), torch.randn(2, 7, d)
    keys[..., 3] *= 100
    rows = written(keys, keys, dtype)
    exact = q.double() @ keys.double().transpose(1, 2)
    lengths = q.double().norm(dim=-1)[..., None] * keys.double().norm(dim=-1)[:, None]
    assert ((key_products(q, rows[:2]) - exact).abs() / lengths).max() < bound
    values = read_values(rows[2:])
    if dtype is torch.int16:
        assert torch.equal(values, keys.bfloat16().float())
    else:
        assert ((values - keys).abs() <= keys.abs().amax(-1, keepdim=True) / 253).all()


@pytest.mark.parametrize("even", [False, True])
def test_the_largest_sums_fit_into_32_bits(even: bool) -> None:
    row = torch.ones(1024) if even else torch.eye(1024)[5]
    whole, scale = integers(row * 1e6, torch.int16)
    assert whole.long().square().sum() < 2**31
    assert whole.max() > (1000 if even else 32_000)
    assert torch.allclose(whole * scale, row * 1e6, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8], ids=str)
def test_rows_without_length_are_zeros(dtype: torch.dtype) -> None:
    whole, _ = integers(torch.tensor([[0.0, 0.0], [1e-20, 1e-20]]), dtype)
    assert not whole.any()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8], ids=str)
def test_accepted_rows_move_with_their_scales(dtype: torch.dtype) -> None:
    pool = KVPool([(2, 32)], 2, 8, dtype, torch.device("cpu"))
    pool.fill()
    (layer,) = pool.layers
    assert isinstance(layer, torch.Tensor)
    assert layer.shape == (2, 16, row_size(32, dtype))
    before = layer[:, 13].clone()
    pool.commit([Move(np.array([1, 0]), sources=[5], start=3)])
    assert torch.equal(layer[:, 11], before)


def test_bytes_of_a_token() -> None:
    shapes = [(4, 64), (2, 32), (0, 1)]
    assert kv_bytes(shapes, torch.bfloat16) == 2 * (4 * 64 + 2 * 32)
    assert kv_bytes(shapes, torch.int16) == 2 * (4 * 66 + 2 * 34)
    assert kv_bytes(shapes, torch.int8) == 4 * 68 + 2 * 36
