"""Lookahead: the window against Jacobi iteration by definition, and the pool against lists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernels import FASTEST
from verifying import match

from soothsay import LLM, DrafterError, DraftTree, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import EVERYBODY
from soothsay.drafters.models.lookahead import Lookahead
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

TARGET = Target(SimpleNamespace(kernels=FASTEST), None, EngineConfig(), 0)  # type: ignore[arg-type]
GREEDY = SamplingParams(temperature=0, max_tokens=500)


def request_of(drafter: Lookahead, tokens: Sequence[int], max_nodes: int = 200) -> Request:
    request = Request(tokens, GREEDY, seed=0, limit=len(tokens) + 400, drafter=drafter)
    request.max_nodes = max_nodes
    return request


def says(context: Sequence[int]) -> int:
    """Return the target's next token after `context`: arbitrary, but dependent on all of its tokens."""
    return random.Random(repr([int(token) for token in context])).randrange(1000)


def show(drafter: Lookahead, request: Request, tree: DraftTree) -> int:
    """One step of such a target with `tree`; returns how many tokens came."""
    committed = request.tokens.tolist()
    draws = [says([*committed, *(tree.tokens[n] for n in tree.path(i)[1:])]) for i in range(len(tree))]
    verdict = match(tree, draws)
    logits = torch.nn.functional.one_hot(torch.tensor(draws), 1000).float()
    drafter.observe([Observation(request, len(committed) - 1, 1, (), tree, logits, verdict)])
    request.emit(verdict.tokens)
    return len(verdict.tokens)


def paths(tree: DraftTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in path[1:]] for path in tree.paths()]


def ngrams_of(drafter: Lookahead) -> set[tuple[int, ...]]:
    return {(first, *rest) for first, many in drafter.pools[EVERYBODY].items() for rest in many}


@pytest.mark.parametrize(("window", "ngram"), [(1, 2), (4, 2), (3, 3), (5, 4), (2, 6)])
def test_the_window_is_jacobi_iteration(window: int, ngram: int) -> None:
    """By definition, a column's next token is the target's token after three parts.

    The parts are the text, the first guesses of the columns before it, and the column's own guesses.
    """
    drafter = Lookahead(TARGET, window=window, ngram=ngram, guesses=50)
    request = request_of(drafter, [1, 2, 3])
    made = set()
    for _ in range(60):
        (tree,) = drafter.propose([request])
        text, columns = request.tokens.tolist(), dict(drafter._columns[request])
        begin = len(text)
        assert sorted(columns) == list(range(begin, begin + window))
        assert all(column[0] in text or len(column) > 1 for column in columns.values()) or begin > 3
        expected: dict[int, list[int]] = {}
        for position, column in sorted(columns.items()):
            before = [columns[p][0] for p in range(begin, position)]
            longer = [*column, says([*text, *before, *column])]
            if len(longer) == ngram:
                made.add(tuple(longer))
                longer = longer[1:]
            expected[position + 1] = longer
        show(drafter, request, tree)
        assert drafter._columns[request] == expected
    assert len(made) > 30
    text = request.tokens.tolist()
    read = {tuple(text[i : i + ngram]) for i in range(len(text) - ngram + 1)}
    assert made <= ngrams_of(drafter) <= made | read


def test_the_tree_is_a_spine_with_branches_and_ngrams_beside_it() -> None:
    drafter = Lookahead(TARGET, window=3, ngram=3, guesses=2)
    assert drafter.max_nodes == 1 + 2 * 3 + 2 * 2
    request = request_of(drafter, [7, 1, 2, 7, 3, 4, 7, 5, 6, 7])
    drafter.propose([request])
    drafter._columns[request] = {10: [20, 21], 11: [30, 31], 12: [40]}
    (tree,) = drafter.propose([request])
    assert paths(tree) == [[5, 6], [3, 4], [20, 21], [20, 30, 31], [20, 30, 40]]
    assert min(tree.scores[1:5]) > max(tree.scores[5:])


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_the_window_gives_way_where_there_is_no_room(max_nodes: int) -> None:
    drafter = Lookahead(TARGET, window=4, ngram=3, guesses=2)
    request = request_of(drafter, [7, 1, 2, 7, 3, 4, 7], max_nodes=max_nodes)
    for _ in range(5):
        (tree,) = drafter.propose([request])
        assert len(tree) <= max(max_nodes, 1 + 2 * 2), "n-grams that are too many are cut by the engine"
        spine: list[int] = []
        for _, column in sorted(drafter._columns[request].items()):
            assert len(tree.walk([*spine, *column])) == 1 + len(spine) + len(column), "whole, or not there"
            spine.append(column[0])
        show(drafter, request, tree.prune(max_nodes, 99))
    assert max_nodes < 13 or len(drafter._columns[request]) >= 3


def test_near_the_end_nothing_is_guessed() -> None:
    drafter = Lookahead(TARGET)
    request = request_of(drafter, [1, 2, 1, 2, 1])
    for left in (1, 0):
        request.limit = 5 + left
        assert len(drafter.propose([request])[0]) == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_keeps_the_latest(seed: int) -> None:
    """Against lists: of each first token the latest `guesses`, of first tokens the latest `pool`."""
    rng = np.random.default_rng(seed)
    drafter = Lookahead(TARGET, window=0, ngram=3, guesses=2, pool=4)
    text = rng.integers(0, 7, 150).tolist()
    request = request_of(drafter, text[:5])
    drafter.propose([request])
    for begin in range(5, 150, 5):  # read in pieces
        request.emit(text[begin : begin + 5])
        drafter.propose([request])
        seen = [tuple(text[i : i + 3]) for i in range(begin + 5 - 2)]
        kept: list[list[tuple[int, ...]]] = []  # of each first token, the latest of both last
        for ngram in seen:
            (own,) = [many for many in kept if many[0][0] == ngram[0]] or [[]]
            kept = [many for many in kept if many is not own]
            kept = [*kept, [*(other for other in own if other != ngram), ngram][-2:]][-4:]
        have = [[(first, *rest) for rest in many] for first, many in drafter.pools[EVERYBODY].items()]
        assert have == kept


def test_steps_that_it_did_not_see_are_no_trouble() -> None:
    drafter = Lookahead(TARGET, window=3, ngram=3)
    request = request_of(drafter, [1, 2, 3])
    for skipped in (1, 2, 5):
        (tree,) = drafter.propose([request])
        other = DraftTree(tree.tokens[0])  # somebody else's guesses were verified
        other.extend([5, 6, 7])
        before = dict(drafter._columns[request])
        show(drafter, request, other)
        assert list(drafter._columns[request].values()) == list(before.values())
        for _ in range(skipped):
            request.emit([says(request.tokens)])
    (tree,) = drafter.propose([request])
    begin = len(request.tokens)
    assert sorted(drafter._columns[request]) == [begin, begin + 1, begin + 2]
    text = request.tokens.tolist()
    assert {tuple(text[i : i + 3]) for i in range(len(text) - 2)} <= ngrams_of(drafter)
    drafter.release(request)
    drafter.release(request)
    show(drafter, request, tree)
    drafter.propose([request])
    drafter.reset()
    assert not ngrams_of(drafter)


def follower(make: Make) -> tuple[Transformer, list[int]]:
    """A target that says the next token of one great circle through its vocabulary, and the circle."""
    model = make(0, num_layers=1, windows=(None,), hidden_size=96, vocab_size=96)
    circle = np.random.default_rng(3).permutation(96).tolist()
    model.blocks[0].attention.o.weight.zero_()
    model.blocks[0].mlp.down.weight.zero_()
    model.embedding.weight.copy_(torch.eye(96))
    model.head.weight.zero_()
    for token, behind in zip(circle, [*circle[1:], circle[0]], strict=True):
        model.head.weight[behind, token] = 5.0
    return model, circle


def test_the_window_makes_ngrams_that_were_in_no_text(tiny: Make) -> None:
    """The answer never repeats the prompt or itself; all that is guessed right was made in the window."""
    model, circle = follower(tiny)
    llm = LLM(model, drafter="none", kv_tokens=512)
    prompt = [*circle[10:90:7], circle[0]]  # tokens that will come, but none right after its neighbour
    accepted = dict.fromkeys((0, 2, 4), 0)
    for window, seed in itertools.product(
        accepted, range(4)
    ):  # a seed decides which tokens columns begin with
        params = SamplingParams(temperature=0, max_tokens=90, seed=seed, ignore_eos=True)
        drafter = Lookahead(llm.engine.target, window=window, ngram=3, guesses=2)
        result = llm.generate(prompt, params, drafter=drafter)
        assert result.token_ids == [*circle[1:], circle[0]][:90]
        accepted[window] += result.stats.accepted
    assert accepted[0] == 0
    assert 40 < accepted[2] < accepted[4]


def test_above_temperature_0_a_guess_at_a_position_is_a_guess_at_its_draw(tiny: Make) -> None:
    """Noise is the position's own: the window comes to know draws that nobody could foresee from text."""
    model = tiny(0)
    llm = LLM(model, drafter="none", kv_tokens=1024)
    params = SamplingParams(temperature=5.0, max_tokens=150, seed=3, ignore_eos=True)  # noise decides
    plain = llm.generate([1, 2, 3], params)
    repeats = sum(a == b for a, b in zip(plain.token_ids, plain.token_ids[1:], strict=False))
    assert repeats < 10
    window, text = (
        llm.generate([1, 2, 3], params, drafter=lambda t: Lookahead(t, window=width, ngram=2, guesses=1))  # noqa: B023
        for width in (8, 0)
    )
    assert window.token_ids == text.token_ids == plain.token_ids
    assert window.stats.mean_accepted > 1.5 > text.stats.mean_accepted


@pytest.mark.parametrize("options", [{"window": -1}, {"ngram": 1}, {"guesses": 0}, {"pool": 0}])
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(DrafterError, match=rf"^lookahead\(.*{name}={value}"):
        Lookahead(TARGET, **options)


def test_options_may_be_as_small_as_can_be() -> None:
    drafter = Lookahead(TARGET, window=0, ngram=2, guesses=1, pool=1)
    request = request_of(drafter, [1, 2, 1])
    assert paths(drafter.propose([request])[0]) == [[]], "only the last first token is remembered"
    request = request_of(drafter, [1, 1])
    assert paths(drafter.propose([request])[0]) == [[1]]
    assert replace(GREEDY).temperature == 0
