"""Layers of oneDNN: few numbers of rows run, since each takes memory, and bits do not depend on them."""

from __future__ import annotations

import pytest
import torch
from row_bits import assert_row_bits

from soothsay.model.ops.linear import Dense, InBlocks, Packed, padded_rows, stock_linear


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


@pytest.mark.parametrize("machine", ["without oneDNN", "not measured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_that_may_depend_on_rows_have_one_shape(
    machine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine == "without oneDNN":
        monkeypatch.setattr(Packed, "available", lambda: False)
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    torch.manual_seed(0)
    weight, bias = torch.randn(101, 75).to(dtype), torch.randn(101).to(dtype)
    layer, sizes = stock_linear(weight, bias, dtype), set[int]()
    assert isinstance(layer, InBlocks)
    assert layer.dtype == dtype
    layer.layer.register_forward_pre_hook(lambda module, inputs: sizes.add(len(inputs[0])))
    rows = torch.randn(64, 75)
    assert_row_bits(layer, rows)
    assert sizes == {InBlocks.ROWS}
    torch.testing.assert_close(layer(rows), Dense(weight, bias)(rows), rtol=2e-2, atol=1e-1)
    assert layer(rows[:0]).shape == (0, 101)
