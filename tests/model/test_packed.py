"""Layers of oneDNN: few numbers of rows run, since each takes memory, and bits do not depend on them."""

from __future__ import annotations

import pytest
import torch

from soothsay.model.linear import Packed, padded_rows


def test_few_numbers_of_rows_run() -> None:
    numbers = [padded_rows(rows) for rows in range(1, 4097)]
    assert len(set(numbers)) < 100
    assert numbers[:16] == [2, *range(2, 17)]
    for rows, padded in enumerate(numbers, 1):
        assert rows <= padded
        assert padded == 2 or padded < 1.5 * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_padding(dtype: torch.dtype) -> None:
    if not Packed.available(dtype):
        pytest.skip("oneDNN has no bfloat16 kernels on this machine")
    torch.manual_seed(0)
    layer = Packed(torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype))
    x = torch.randn(300, 64).to(dtype)
    every = layer(x)
    for rows in (1, 2, 16, 17, 23, 24, 63, 65, 100, 255, 257):
        assert torch.equal(layer(x[:rows]), every[:rows])
