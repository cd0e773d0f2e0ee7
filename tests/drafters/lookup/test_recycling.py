"""Token Recycling: what is in the matrix, and that trees are the best that can be walked in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernels import OPS
from one_shot import counting_model
from verifying import match

from soothsay import LLM, DrafterError, DraftTree, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.core.noise import noise_key
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import EVERYBODY
from soothsay.drafters.lookup.recycling import Recycling
from soothsay.drafters.trees.templates import best_template
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

VOCAB = 97
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, seed=5)


@pytest.fixture
def target(tiny: Make) -> Target:
    return Target(tiny(0), None, EngineConfig(), 4)


def request_of(
    drafter: Recycling, tokens: Sequence[int], params: SamplingParams = GREEDY, max_nodes: int = 16
) -> Request:
    request = Request(tokens, params, seed=5, limit=len(tokens) + 40, drafter=drafter)
    request.max_nodes = max_nodes
    return request


def show(drafter: Recycling, request: Request, tree: DraftTree, logits: torch.Tensor) -> None:
    draws = logits.argmax(-1).tolist()
    drafter.observe([Observation(request, len(request.tokens) - 1, 1, (), tree, logits, match(tree, draws))])


def fill(drafter: Recycling, tokens: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Show the drafter random logits after each of `tokens`. Returns the logits."""
    tree = DraftTree(tokens[0])
    for token in tokens[1:]:
        tree.add(0, token)
    logits = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    show(drafter, request_of(drafter, [tokens[0]]), tree, logits)
    return logits


def says(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Every node's path, and its score."""
    return {
        tuple(tree.tokens[above] for above in tree.path(node)[1:]): tree.scores[node]
        for node in range(1, len(tree))
    }


def test_all_nodes_fill_the_matrix_and_of_equal_tokens_the_accepted_one_stays(target: Target) -> None:
    drafter = Recycling(target, branch=4)
    tree = DraftTree(3)
    wrong, right = tree.add(0, 10), tree.add(0, 20)
    tree.add(right, 30)
    also = tree.add(wrong, 20)  # the same token as the accepted one, in a wrong place
    logits = torch.randn(len(tree), VOCAB)
    logits[0, 20] = 50.0  # so that the second is accepted
    show(drafter, request_of(drafter, [1, 2, 3]), tree, logits)
    for node, token in enumerate(tree.tokens):
        expected = logits[right if node == also else node].topk(4)
        assert drafter.memories[EVERYBODY].tokens[token].tolist() == expected.indices.tolist()
        log_probs = expected.values.log_softmax(-1).numpy()
        assert np.allclose(drafter.memories[EVERYBODY].log_probs[token], log_probs, atol=2e-2, rtol=1e-2)
    assert (drafter.memories[EVERYBODY].log_probs[[0, 1, 2, 40]] == -np.inf).all()
    drafter.reset()
    assert (drafter.memories[EVERYBODY].log_probs == -np.inf).all()


def test_what_was_read_stands_in_for_what_was_not_thought(target: Target) -> None:
    drafter = Recycling(target, branch=4)
    fill(drafter, [5])
    known = drafter.memories[EVERYBODY].tokens[5].tolist()
    request = request_of(drafter, [5, 6, 7, 5])
    (tree,) = drafter.propose([request])
    assert drafter.memories[EVERYBODY].tokens[5].tolist() == known, "logits know better"
    assert [drafter.memories[EVERYBODY].tokens[token, 0] for token in (6, 7)] == [7, 5]
    request = request_of(drafter, [8, 9])
    (tree,) = drafter.propose([request])
    assert len(tree) == 1, "nothing follows 9 yet"
    request.emit([8, 60])
    (tree,) = drafter.propose([request])
    assert (drafter.memories[EVERYBODY].tokens[9, 0], drafter.memories[EVERYBODY].tokens[8, 0]) == (
        8,
        9,
    ), "what came first stays"
    drafter.release(request)
    drafter.release(request)
    request.emit([9])
    (tree,) = drafter.propose([request])
    assert [path for path in says(tree) if len(path) < 4] == [(8,), (8, 9), (8, 9, 8)]


def walks(
    drafter: Recycling, request: Request, depth: int, rates: Sequence[Sequence[float]] | None
) -> dict[tuple[int, ...], float]:
    """Return the scores of all paths in the matrix, by recursion, with the sampler's own noise."""
    params, found = request.params, dict[tuple[int, ...], float]()

    def go(token: int, path: tuple[int, ...], score: float) -> None:
        if len(path) == depth:
            return
        tokens, log_probs = (
            drafter.memories[EVERYBODY].tokens[token],
            torch.from_numpy(drafter.memories[EVERYBODY].log_probs[token]).float(),
        )
        if params.temperature > 0:
            key = torch.tensor([noise_key(request.seed, len(request.tokens) + len(path))])
            noise = OPS.gumbel(key, torch.from_numpy(tokens)[None].long())[0]
            if log_probs[1] > -math.inf:
                log_probs = (log_probs / params.temperature + noise).log_softmax(-1)
        order = sorted(range(len(tokens)), key=lambda i: -float(log_probs[i]))
        for rank, i in enumerate(order):
            own = float(log_probs[i])
            if own > -math.inf:
                own = math.log(rates[len(path)][rank]) if rates else own
                below = (*path, int(tokens[i]))
                found[below] = score + own
                go(int(tokens[i]), below, score + own)

    go(int(request.tokens[-1]), (), 0.0)
    return found


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, temperature=0.3, seed=8)])
@pytest.mark.parametrize("size", [1, 5, 15])
def test_best_first_trees_are_the_best_of_all(params: SamplingParams, size: int, target: Target) -> None:
    drafter = Recycling(target, branch=4, depth=4)
    fill(drafter, range(VOCAB - 20))  # some tokens lead nowhere
    for root in range(0, VOCAB - 20, 7):
        request = request_of(drafter, [*range(80, 96), root], params, max_nodes=1 + size)
        (tree,) = drafter.propose([request])
        every = walks(drafter, request, 4, None)
        got, best = says(tree), sorted(every.values(), reverse=True)[:size]
        assert len(got) == size
        assert np.allclose(sorted(got.values(), reverse=True), best, atol=2e-3)
        assert all(abs(every[path] - score) < 2e-3 for path, score in got.items())


@pytest.mark.parametrize("kind", ["static", "measured"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_trees_by_rank_are_the_best_templates(params: SamplingParams, kind: str, target: Target) -> None:
    drafter = Recycling(target, branch=4, depth=3, tree=kind)
    fill(drafter, range(VOCAB))
    if kind == "measured":
        for _ in range(40):
            fill(drafter, range(VOCAB), seed=0)  # what is likeliest comes again and again
        assert drafter.memories[EVERYBODY].acceptance.rates[0][0] > 0.6
    rates = drafter.memories[EVERYBODY].acceptance.rates
    for root in range(0, 40, 7):
        request = request_of(drafter, [root], params)
        (tree,) = drafter.propose([request])
        walked = walks(drafter, request, 3, rates)
        scores = sorted(
            math.log(math.prod(rates[i][r] for i, r in enumerate(path))) for path in best_template(rates, 15)
        )[::-1]
        got = says(tree)
        assert np.allclose(sorted(got.values(), reverse=True)[:15], scores, atol=1e-4)
        assert all(abs(walked[path] - score) < 1e-4 for path, score in got.items())


@pytest.mark.parametrize("kind", ["best-first", "static", "measured"])
def test_it_guesses_no_more_than_is_of_use(kind: str, target: Target) -> None:
    drafter = Recycling(target, nodes=12, depth=5, tree=kind)
    assert drafter.max_nodes == 13
    fill(drafter, range(VOCAB))
    request = request_of(drafter, [1, 2], max_nodes=50)
    (tree,) = drafter.propose([request])
    assert 13 <= len(tree) <= 13 + 4  # of equal scores there may be more
    request.max_nodes = 1
    assert len(drafter.propose([request])[0]) == 1
    request.max_nodes = 16
    for left in (3, 1, 0):
        request.limit = len(request.tokens) + left
        assert max(drafter.propose([request])[0].depths) == max(min(left - 1, 5), 0)


def test_a_target_that_counts_is_known_by_heart_after_one_round() -> None:
    llm = LLM(counting_model(16), drafter="none", kv_tokens=512)
    drafter = Recycling(llm.engine.target)
    params = replace(GREEDY, max_tokens=64, ignore_eos=True)
    llm.generate([0], replace(params, max_tokens=20), drafter=drafter)
    stats = llm.generate([3], params, drafter=drafter).stats
    assert set(stats.acceptance) == {1.0}
    assert stats.mean_accepted > 6
    drafter.reset()
    assert llm.generate([3], params, drafter=drafter).stats.mean_accepted < stats.mean_accepted


def test_above_temperature_0_it_guesses_the_very_draws_of_a_target_without_context(tiny: Make) -> None:
    """The matrix holds all logits of this target. The noise is known, so the draw is known too."""
    model = tiny(0)
    for block in model.blocks:
        block.attention.o.weight.zero_()
        block.mlp.down.weight.zero_()
    llm = LLM(model, drafter="none", kv_tokens=1024, max_tree=3)
    drafter = Recycling(llm.engine.target, branch=VOCAB)
    params = replace(SAMPLED, temperature=1.0, max_tokens=200)
    for seed in range(4):  # until every token has been seen
        llm.generate([1], replace(params, seed=seed), drafter=drafter)
    stats = llm.generate([1], replace(params, seed=99), drafter=drafter).stats
    assert stats.acceptance[0] > 0.97
    assert stats.acceptance[1] > 0.9
    plain = llm.generate([1], replace(params, seed=99), drafter="none")
    assert len(set(plain.token_ids)) > 20, "no draw is likely by itself"


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_tokens_that_lead_nowhere_are_no_trouble(temperature: float, target: Target) -> None:
    drafter = Recycling(target)
    request = request_of(drafter, [4, 4, 5], replace(SAMPLED, temperature=temperature))
    with np.errstate(all="raise"):
        (tree,) = drafter.propose([request])
    assert says(tree) == {}
    fill(drafter, [5])
    (tree,) = drafter.propose([request])
    assert len(tree) > 1
    assert all(score > -math.inf for score in tree.scores)


@pytest.mark.parametrize("options", [{"branch": 0}, {"depth": 0}, {"nodes": 0}, {"tree": "oak"}])
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], target: Target) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(DrafterError, match=rf"^recycling\(.*{name}={value!r}"):
        Recycling(target, **options)
