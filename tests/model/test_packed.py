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
@pytest.mark.parametrize("inputs", [24, 64, 1000, 2048])
@pytest.mark.parametrize("outputs", [40, 96, 256, 1000])
def test_bits_do_not_depend_on_the_padding(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """With 24, or 1000 and more, inputs oneDNN's own products of bfloat16 fail this on AMX."""
    if not Packed.available():
        pytest.skip("this build of torch has no oneDNN")
    torch.manual_seed(0)
    layer = Packed(torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype))
    x = (torch.randn(300, inputs) * torch.rand(300, 1)).to(dtype)
    every = layer(x)
    assert every.dtype is dtype
    for rows in (1, 2, 3, 5, 7, 12, 16, 17, 23, 24, 63, 65, 100, 255, 257):
        assert torch.equal(layer(x[:rows]), every[:rows])
