"""The largest of many numbers, natively, against stock operations."""

from __future__ import annotations

import math

import pytest
import torch

from soothsay.model.native.native_kernels import NativeKernels

FACTORS = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])


def logits(width: int) -> torch.Tensor:
    return 8 * torch.randn(5, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", [1, 7, 64, 100, 8192, 151_937])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_values_and_places(kernels: NativeKernels, width: int, count: int) -> None:
    x = logits(width)
    values, places = kernels.sampling.largest(x, count)
    expected = x.topk(min(count, width), dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("width", [1, 7, 64, 100, 8192, 151_937])
def test_log_probabilities_of_what_is_made_surer(kernels: NativeKernels, width: int) -> None:
    x = logits(width)
    values, places = kernels.sampling.largest(x, 5, FACTORS)
    expected = (x.double() * FACTORS[:, None]).log_softmax(-1)
    # float sums of 151,937 numbers
    torch.testing.assert_close(values, expected.gather(1, places).float(), rtol=0, atol=1e-4)


def test_what_cannot_be_said(kernels: NativeKernels) -> None:
    """Fewer tokens than are wanted, or none at all."""
    x = torch.full((3, 300), -math.inf)
    x[0, 299], x[0, 70] = 3.0, 2.0
    x[1, 5] = -1e4
    values, places = kernels.sampling.largest(x, 3, torch.ones(3))
    assert places[0, :2].tolist() == [299, 70]
    torch.testing.assert_close(values[0, :2].exp().sum(), torch.tensor(1.0))
    assert values[1].tolist() == [0.0, -math.inf, -math.inf]
    assert places[1, 0] == 5
    assert torch.isneginf(values[0, 2])
    assert torch.isneginf(values[2]).all()


def test_of_equal_ones_the_first(kernels: NativeKernels) -> None:
    x = torch.zeros(1, 200)
    x[0, [150, 60, 199]] = 1.0
    assert kernels.sampling.largest(x, 4)[1].tolist() == [[60, 150, 199, 0]]


def test_rows_that_are_not_in_a_row_in_memory(kernels: NativeKernels) -> None:
    x = logits(256)
    assert torch.equal(kernels.sampling.largest(x[::2, ::2], 4)[1], x[::2, ::2].topk(4, dim=-1).indices)
