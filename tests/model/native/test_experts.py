"""Mixtures of experts in the library, against stock operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.routing import RoutingOps
from soothsay.model.specs.feed_forward_spec import RoutingSpec

SOFTMAX = RoutingSpec(12, 4)
GROUPS = replace(SOFTMAX, sigmoid=True, groups=4, groups_chosen=2, scale=2.5)
ROUTINGS = {
    "normalized": SOFTMAX,
    "as they are": replace(SOFTMAX, normalize=False, scale=16.0),
    "the best of each group": replace(SOFTMAX, groups=3, groups_chosen=2, group_best=1),
    "groups": GROUPS,
    "near ones": replace(SOFTMAX, chosen=3, within=0.5),
    "all": replace(SOFTMAX, chosen=12),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_choose_the_same_experts(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    c = ROUTINGS[name]
    scores = torch.randn(200, c.count).to(dtype)
    scores[50:100] = scores[50:100].round()  # many are equal: the first wins
    correction = torch.randn(c.count) - 2 if c is GROUPS else None  # most sums are below 0
    shares, chosen = kernels.route(scores, c, correction)
    expected, numbers = RoutingOps().route(scores, c, correction)
    assert torch.equal(chosen, numbers)
    torch.testing.assert_close(shares, expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(chosen.sort(-1).values, chosen)


def test_scores_that_are_apart_in_memory(kernels: NativeKernels) -> None:
    scores = torch.randn(30, 2 * SOFTMAX.count)[:, ::2]
    for found, expected in zip(
        kernels.route(scores, SOFTMAX, None), kernels.route(scores.contiguous(), SOFTMAX, None), strict=True
    ):
        assert torch.equal(found, expected)


def test_scores_that_are_no_numbers_choose_experts_that_exist(kernels: NativeKernels) -> None:
    for c in ROUTINGS.values():
        scores = torch.full((3, c.count), torch.nan)
        scores[1:, 3] = torch.inf
        _, chosen = kernels.route(scores, c, torch.zeros(c.count) if c is GROUPS else None)
        assert ((chosen >= 0) & (chosen < c.count)).all()
        assert all(len(set(row)) == c.chosen for row in chosen.tolist())


def test_shares_of_experts_that_nothing_speaks_for(kernels: NativeKernels) -> None:
    """Sigmoids of low scores are zero, and their sum is no divisor."""
    scores, c = torch.full((3, SOFTMAX.count), -200.0), replace(SOFTMAX, sigmoid=True)
    assert torch.equal(kernels.route(scores, c, None)[0], torch.zeros(3, c.chosen))
    assert torch.equal(RoutingOps().route(scores, c, None)[0], torch.zeros(3, c.chosen))
