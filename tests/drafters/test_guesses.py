"""What guesses are made of: a drafter's confidence, and the best of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from soothsay import DraftTree, SamplingParams
from soothsay.drafters import NoDrafter
from soothsay.drafters.guesses import confidence, guess, largest
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes, perturb

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.7, top_k=20)
PENALIZED = SamplingParams(temperature=0, logit_bias={3: -math.inf, 4: 2.0})


def nodes(params: SamplingParams, count: int, seed: int) -> Nodes:
    request = Request([1, 2, 3], params, seed=seed, limit=40, drafter=NoDrafter(None))  # type: ignore[arg-type]
    tree = DraftTree(3)
    tree.extend([5] * (count - 1))
    return Nodes(request, tree, range(count))


@pytest.mark.parametrize("kinds", [[GREEDY], [SAMPLED], [GREEDY, SAMPLED, PENALIZED], [PENALIZED, GREEDY]])
def test_greedy_guesses_are_surer_than_the_drafter_says(kinds: Sequence[SamplingParams]) -> None:
    """Those that are drawn are as sure; nobody's depend on who is guessed for beside."""
    torch.manual_seed(0)
    logits = torch.randn(2 * len(kinds), 50) * 2
    given = logits.clone()
    asked = [nodes(params, 2, seed) for seed, params in enumerate(kinds)]
    together = confidence(logits, asked).split(2)
    assert torch.equal(logits, given)
    for own, rows, one in zip(together, logits.split(2), asked, strict=True):
        scores = perturb(rows, [one])
        power = 2 if one.request.params.temperature == 0 else 1
        expected = scores.softmax(-1) ** power
        torch.testing.assert_close(own.exp(), expected / expected.sum(-1, keepdim=True))
        assert torch.equal(own, confidence(rows, [one]))
        assert torch.equal(own.argmax(-1), scores.argmax(-1))
        assert torch.equal(own.isneginf(), scores.isneginf())


def test_guesses_below_a_bound_are_left_out() -> None:
    tree = DraftTree(1)
    first = tree.add(0, 2, -1.0)
    likeliest = [-0.5, -1.5, -2.5, -math.inf], [7, 8, 9, 10]
    assert guess(tree, first, likeliest, range(4), -2.5) == {0: 2}
    assert guess(tree, 0, likeliest, [0, 2, 3], -math.inf) == {0: 3, 2: 4}
    assert tree.scores == [0.0, -1.0, -1.5, -0.5, -2.5]


@pytest.mark.parametrize("vocab", [5, 97, 1024, 8192, 8200, 5001])
@pytest.mark.parametrize("count", [1, 8, 20])
def test_the_largest_are_those_of_topk(vocab: int, count: int) -> None:
    logits = torch.stack([torch.randperm(vocab) for _ in range(7)]).float()
    logits[1, -1] = logits[2, 0] = logits[3, -3] = vocab + 1.0  # at the edges
    values, tokens = largest(logits, min(count, vocab))
    expected = logits.topk(min(count, vocab), dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(tokens, expected.indices)
