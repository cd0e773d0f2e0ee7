"""What adapters add to a linear layer: against products in float64, and each row in other company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.kernels import Kernels, StockKernels

INPUTS, RANKS, BLOCKS = 96, (16, 48, 16), ((0, 32, 16), (8, 64, 32), (40, 80, 4))
"""Sizes of three adapters. The second matrices have blocks: first rank, first output, number of ranks."""
NUMBERS = [0, 2, -1, 1, 0, 1, 1, *[0] * 30, -1, 2]


def adapters(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    made = []
    for rank, (first, out, count) in zip(RANKS, BLOCKS, strict=True):
        up = torch.zeros(112, rank)
        first = min(first, rank - count)
        up[out:, first : first + count] = torch.randn(112 - out, count)
        made.append(((torch.randn(rank, INPUTS) / 10).to(dtype), up.to(dtype)))
    return made


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_rows_get_what_their_adapters_add(
    kernels: NativeKernels, inputs: torch.dtype, outputs: torch.dtype, weights: torch.dtype
) -> None:
    own, numbers = adapters(weights), torch.tensor(NUMBERS)
    x, before = torch.randn(len(NUMBERS), INPUTS).to(inputs), torch.randn(len(NUMBERS), 112).to(outputs)
    layers = [*(kernels.low_rank(*pair) for pair in own), None]
    expected = before.double()
    for row, number in enumerate(NUMBERS):
        if number >= 0:
            down, up = own[number]
            expected[row] += up.double() @ (down.double() @ x[row].double())
    made = kernels.adapt(before.clone(), x, layers, numbers)
    bound = {"rtol": 0.008, "atol": 0.0} if outputs == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(made.double(), expected, **bound)
    assert torch.equal(made[numbers < 0], before[numbers < 0])
    for rows in ([3], [41 - 3, 0, 5], [*range(7, 24)], [*range(7, 30)]):
        again = kernels.adapt(before[rows].clone(), x[rows], layers, numbers[rows])
        assert torch.equal(again, made[rows])


@pytest.mark.parametrize("chosen", ["stock", "native"])
def test_an_adapter_may_leave_a_layer_as_it_is(kernels: NativeKernels, chosen: str) -> None:
    ops: Kernels = kernels if chosen == "native" else StockKernels()
    x, before, numbers = torch.randn(5, INPUTS), torch.randn(5, 112), torch.tensor([1, 0, -1, 1, 0])
    made = ops.adapt(before.clone(), x, [ops.low_rank(*adapters(torch.float32)[0]), None], numbers)
    changed = (made != before).any(1)
    assert changed.tolist() == [False, True, False, False, True]
