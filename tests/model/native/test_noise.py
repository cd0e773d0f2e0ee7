"""The native hash against stock operations: it decides what is drawn, so every bit counts."""

from __future__ import annotations

import pytest
import torch
from kernels import STOCK_OPS

from soothsay import DraftTree, SamplingParams
from soothsay.core.noise import uniform
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.drafters.base import NoDrafter
from soothsay.model.native.native_kernels import NativeKernels


@pytest.mark.parametrize("width", [1, 7, 16, 8192, 151_937])
def test_the_same_bits_as_stock_operations(kernels: NativeKernels, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    keys = torch.randint(0, 1 << 32, (5, 2), generator=generator)
    keys[0], keys[1] = 0, (1 << 32) - 1
    for tokens in (torch.arange(width)[None], torch.randint(0, 200_000, (5, width), generator=generator)):
        assert torch.equal(kernels.sampling.uniform(keys, tokens), uniform(keys, tokens))


def test_the_largest_and_the_smallest_are_within_0_and_1(kernels: NativeKernels) -> None:
    """Tokens whose hashes are the smallest and the largest there are: with keys 0, token 0 has hash 0."""
    keys, tokens = torch.zeros(1, 2, dtype=torch.int64), torch.arange(1 << 20)[None]
    values = kernels.sampling.uniform(keys, tokens)
    assert values[0, 0] == 2.0**-33
    assert 0 < values.min() < values.max() < 1


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0)]
)
def test_kernels_sample_the_same_tokens(kernels: NativeKernels, params: SamplingParams) -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, [700, 90]] = 50.0  # equal scores at temperature 0: the first token is emitted
    request = Request([1, 2, 3], params, seed=9, limit=40, drafter=NoDrafter(None))  # type: ignore[arg-type]
    tree = DraftTree(3)
    tree.extend([5] * 5)
    asked, ops = [Nodes(request, tree, range(6))], kernels.sampling
    scores = perturb(logits, asked, ops)
    assert torch.equal(scores, perturb(logits, asked, STOCK_OPS))
    best = ops.argmax(scores)
    assert torch.equal(best, STOCK_OPS.argmax(scores))
    assert params.temperature or best[2] == 90


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("width", [7, 100, 4096])
def test_a_race_finds_the_best_of_all_scores(kernels: NativeKernels, width: int, count: int) -> None:
    """Numbers that are equal, close or far apart: noise decides all, some or hardly any of the places."""
    generator = torch.Generator().manual_seed(width)
    keys = torch.randint(0, 1 << 32, (40, 2), generator=generator)
    noise = STOCK_OPS.gumbel(keys, torch.arange(width)[None])
    for spread in (0.0, 0.3, 4.0):
        x = spread * torch.randn(40, width, generator=generator)
        factors = 0.5 + torch.rand(40, generator=generator)
        scores = x * factors[:, None] + noise
        expected = scores.topk(min(count, width)).values
        values, tokens = kernels.sampling.race(x, factors, keys, count)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.gather(1, tokens), expected, rtol=1e-4, atol=1e-4)


def test_rows_that_are_apart_in_memory(kernels: NativeKernels) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 400, generator=generator)[:, ::2]
    keys = torch.randint(0, 1 << 32, (6, 4), generator=generator)[:, ::2]
    tokens, factors = torch.arange(400)[None, ::2], torch.ones(6)
    assert torch.equal(kernels.sampling.uniform(keys, tokens), uniform(keys, tokens))
    values, places = kernels.sampling.race(x, factors, keys, 3)
    expected = kernels.sampling.race(x.contiguous(), factors, keys.contiguous(), 3)
    assert torch.equal(values, expected[0])
    assert torch.equal(places, expected[1])
