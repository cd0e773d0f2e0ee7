"""What guesses are made of: a drafter's confidence, and the best of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from kernels import OPS, STOCK_OPS
from torch import Tensor

from soothsay import DraftTree, SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.core.sampling_ops import SamplingOps
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.trees.guesses import guess, likeliest

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.7, top_k=20)
PENALIZED = SamplingParams(temperature=0, logit_bias={3: -math.inf, 4: 2.0})


def nodes(params: SamplingParams, count: int, seed: int) -> Nodes:
    request = Request([1, 2, 3], params, seed=seed, limit=40, drafter=NoDrafter(None))  # type: ignore[arg-type]
    tree = DraftTree(3)
    tree.extend([5] * (count - 1))
    return Nodes(request, tree, range(count))


def by_token(values: Tensor, tokens: Tensor) -> Tensor:
    """`[M, 50]`: what stands at 0 for minus infinity is no token's."""
    return torch.full((len(values), 50), -math.inf).scatter_reduce(1, tokens, values, "amax")


@pytest.mark.parametrize("kinds", [[GREEDY], [SAMPLED], [GREEDY, SAMPLED, PENALIZED], [PENALIZED, GREEDY]])
def test_greedy_guesses_are_surer_than_the_drafter_says(kinds: Sequence[SamplingParams]) -> None:
    """Those that are drawn are as sure; nobody's depend on who is guessed for beside."""
    torch.manual_seed(0)
    logits = torch.randn(2 * len(kinds), 50) * 2
    given = logits.clone()
    asked = [nodes(params, 2, seed) for seed, params in enumerate(kinds)]
    values, tokens, scores = likeliest(logits, asked, 50, OPS)
    together = by_token(values, tokens).split(2)
    assert torch.equal(logits, given)
    assert torch.equal(scores, perturb(logits, asked, OPS))
    for own, rows, one in zip(together, logits.split(2), asked, strict=True):
        scores = perturb(rows, [one], OPS)
        power = 2 if one.request.params.temperature == 0 else 1
        expected = scores.softmax(-1) ** power
        torch.testing.assert_close(own.exp(), expected / expected.sum(-1, keepdim=True))
        assert torch.equal(own, by_token(*likeliest(rows, [one], 50, OPS)[:2]))
        assert torch.equal(own.argmax(-1), scores.argmax(-1))


def test_guesses_below_a_bound_are_left_out() -> None:
    tree = DraftTree(1)
    first = tree.add(0, 2, -1.0)
    likeliest = [-0.5, -1.5, -2.5, -math.inf], [7, 8, 9, 10]
    assert guess(tree, first, likeliest, range(4), -2.5) == {0: 2}
    assert guess(tree, 0, likeliest, [0, 2, 3], -math.inf) == {0: 3, 2: 4}
    assert tree.scores == [0.0, -1.0, -1.5, -0.5, -2.5]


@pytest.mark.parametrize("ops", [OPS, STOCK_OPS])
@pytest.mark.parametrize("vocab", [5, 97, 8192])
def test_the_largest(ops: SamplingOps, vocab: int) -> None:
    x = torch.stack([torch.randperm(vocab) for _ in range(7)]).float() / vocab
    x[1, -1] = x[2, 0] = x[3, -3] = 2.0  # at the edges
    factors = torch.linspace(0.5, 20, 7)
    values, places = ops.largest(x, 20)
    expected = x.topk(min(20, vocab), dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)
    values, places = ops.largest(x, 3, factors)
    assert torch.equal(places, expected.indices[:, :3])
    torch.testing.assert_close(
        values, (x * factors[:, None]).log_softmax(-1).gather(1, places), rtol=0, atol=1e-5
    )
