"""Native draws against stock operations. They decide what is drawn, so every bit counts."""

from __future__ import annotations

import pytest
import torch
from kernels import STOCK_OPS

from soothsay import DraftTree, SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.drafters.base import NoDrafter
from soothsay.model.native.native_kernels import NativeKernels


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
        temperatures = 0.5 + torch.rand(40, generator=generator)
        scores, places = (x / temperatures[:, None] + noise).sort(dim=-1, descending=True, stable=True)
        values, tokens = kernels.sampling.race(x, temperatures, keys, count)
        assert torch.equal(values, scores[:, :count])
        assert torch.equal(tokens, places[:, :count])


def test_rows_that_are_apart_in_memory(kernels: NativeKernels) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 400, generator=generator)[:, ::2]
    keys = torch.randint(0, 1 << 32, (6, 4), generator=generator)[:, ::2]
    tokens, factors = torch.arange(400)[None, ::2], torch.ones(6)
    assert torch.equal(kernels.sampling.gumbel(keys, tokens), STOCK_OPS.gumbel(keys, tokens))
    values, places = kernels.sampling.race(x, factors, keys, 3)
    expected = kernels.sampling.race(x.contiguous(), factors, keys.contiguous(), 3)
    assert torch.equal(values, expected[0])
    assert torch.equal(places, expected[1])
