"""The n-gram model: its counts against brute force, what it forgets, and what it learns from each request."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason
from soothsay.core.request import Request
from soothsay.core.tenant import EVERYBODY
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.lookup.ngram import DOUBT, Counts, NGram
from soothsay.drafters.registry import build_drafter

TARGET = Target(None, None, EngineConfig(), 0)  # type: ignore[arg-type]


def ask(drafter: NGram, prompt: Sequence[int], room: int = 100, nodes: int = 64) -> Request:
    params = SamplingParams(temperature=0)
    request = Request(prompt, params, seed=0, limit=len(prompt) + room, drafter=drafter)
    request.max_nodes = nodes
    return request


def hear(drafter: NGram, *texts: Sequence[int]) -> None:
    for text in texts:
        request = ask(drafter, text)
        request.finish_reason = FinishReason.STOP
        drafter.release(request)


def propose(drafter: NGram, *prompt: int) -> DraftTree:
    return drafter.propose([ask(drafter, prompt)])[0]


def known(counts: Counts, context: Sequence[int]) -> dict[int, int]:
    return dict(counts.followers(tuple(context)).counts)


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_those_of_brute_force_however_the_text_comes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = int(rng.integers(2, 6))
    drafter = NGram(TARGET, order=order)
    expected: Counter[tuple[int, ...]] = Counter()
    requests = [ask(drafter, rng.integers(0, 4, int(rng.integers(1, 30))).tolist()) for _ in range(4)]
    for _ in range(10):
        request = requests[int(rng.integers(4))]
        request.emit(rng.integers(0, 4, int(rng.integers(1, 9))).tolist())
        drafter.propose([request])
        if rng.random() < 0.3:
            drafter.release(request)  # preempted: nothing is learnt twice
    for request in requests:
        request.finish_reason = FinishReason.STOP
        drafter.release(request)
        text = request.tokens.tolist()
        for size in range(2, order + 1):
            expected.update(tuple(text[i : i + size]) for i in range(len(text) - size + 1))
    contexts = {gram[:-1] for gram in expected}
    assert len(drafter.memories[EVERYBODY]) == len(contexts)
    for context in contexts:
        after = {gram[-1]: count for gram, count in expected.items() if gram[:-1] == context}
        assert known(drafter.memories[EVERYBODY], context) == after
        followers = drafter.memories[EVERYBODY].followers(context)
        assert (followers.total, followers.distinct) == (sum(after.values()), len(after))


def test_guesses_back_off_to_shorter_contexts_with_what_is_left() -> None:
    drafter = NGram(TARGET, order=3)
    hear(drafter, [1, 2, 3], [1, 2, 3], [1, 2, 4], [9, 2, 5], [9, 2, 5])
    (tree,) = drafter.propose([ask(drafter, [1, 2], room=2)])
    long, short = (DOUBT / (DOUBT + length) for length in (2, 1))  # prompt and answers count alike
    left = long * 2 / 3
    expected = {3: (2 - long) / 3, 4: (1 - long) / 3, 5: left * (2 - short) / 5}
    assert {tree.tokens[node]: tree.scores[node] for node in range(1, len(tree))} == pytest.approx(
        {token: math.log(probability) for token, probability in expected.items()}
    )


def test_it_learns_from_requests_that_still_run() -> None:
    drafter = NGram(TARGET)
    first, second = ask(drafter, [1, 2, 3, 4, 5]), ask(drafter, [1, 2, 3])
    trees = drafter.propose([second, first])
    assert trees[0].tokens[:2] == [3, 4], "and all before any is guessed for"
    first.emit([6])
    second.emit([4, 5])
    drafter.propose([first])
    assert drafter.propose([second])[0].tokens[:2] == [5, 6]


def test_contexts_met_least_recently_are_forgotten_first() -> None:
    counts = Counts(order=2, memory=3)
    counts.read([], [1, 2, 3, 1])  # contexts 1, 2, 3
    counts.read([], [1, 5])  # 1 again
    counts.read([], [4, 6])
    assert len(counts) == 3
    assert [known(counts, [context]) for context in (1, 2, 3, 4)] == [{2: 1, 5: 1}, {}, {1: 1}, {6: 1}]
    rng = np.random.default_rng(0)
    counts = Counts(order=4, memory=50)
    counts.read([], rng.integers(0, 9, 3000).tolist())
    assert len(counts) == 50


def test_reset_is_as_if_just_built() -> None:
    drafter = NGram(TARGET)
    hear(drafter, [1, 2, 3])
    assert len(propose(drafter, 1, 2)) > 1
    drafter.reset()
    assert len(propose(drafter, 1, 2)) == 1


def test_requests_that_are_gone_leave_nothing_behind() -> None:
    drafter = NGram(TARGET)
    request = ask(drafter, [1, 2, 1, 2])
    drafter.release(request)
    drafter.propose([request])
    drafter.release(request)
    assert len(drafter._learnt) == 1
    del request
    gc.collect()
    assert len(drafter._learnt) == 0


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (4, 3), (50, 20)])
def test_it_guesses_no_deeper_than_is_of_use(left: int, depth: int) -> None:
    drafter = NGram(TARGET, nodes=100)
    hear(drafter, *[range(60)] * 50)
    (tree,) = drafter.propose([ask(drafter, range(30), room=left, nodes=21)])
    assert max(tree.depths) == depth


def test_trees_keep_to_nodes() -> None:
    drafter = NGram(TARGET, nodes=7)
    hear(drafter, *[range(60)] * 50)
    assert len(drafter.propose([ask(drafter, range(30))])[0]) == 7
    assert len(drafter.propose([ask(drafter, range(30), nodes=3)])[0]) == 3
    assert len(drafter.propose([ask(drafter, range(30), nodes=1)])[0]) == 1


def test_tokens_are_the_same_while_it_learns_and_forgets(sibyl: LLM) -> None:
    prompts = ["The river rises in the hills. The river", "one two three one two three one two"]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=5),
    ]
    plain = [result.token_ids for result in sibyl.generate(prompts, params)]
    for spec in ("ngram", "ngram(order=9, memory=30)"):
        drafter = build_drafter(spec, sibyl.engine.target)
        for _ in range(3):
            again = sibyl.generate(prompts, params, drafter=drafter)
            assert [result.token_ids for result in again] == plain
        if spec == "ngram":
            assert again[0].stats.steps < 12, "40 tokens that were said twice before"
            drafter.reset()
            assert [r.token_ids for r in sibyl.generate(prompts, params, drafter=drafter)] == plain


@pytest.mark.parametrize("options", [{"order": 1}, {"nodes": 0}, {"memory": 0}])
def test_options_that_cannot_be_meant_are_refused_by_name(options: dict[str, int]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(DrafterError, match=rf"^ngram\(.*{name}={value}"):
        NGram(TARGET, **options)
