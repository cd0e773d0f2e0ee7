"""Which guesses hold: on trees written by hand, and what the engine makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from verifying import match

from soothsay import LLM, FinishReason, Observation, SamplingParams, Target
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict
from soothsay.drafters.base import NoDrafter
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]


def tree_of(*chains: list[int]) -> DraftTree:
    tree = DraftTree(9)
    for chain in chains:
        tree.extend(chain)
    return tree


@pytest.mark.parametrize(
    ("tree", "draws", "verdict"),
    [
        pytest.param(tree_of(), [4], Verdict([], [4]), id="plain decoding: the bonus alone"),
        pytest.param(tree_of([1, 2, 3]), [1, 2, 3, 4], Verdict([1, 2, 3], [1, 2, 3, 4]), id="all of a chain"),
        pytest.param(tree_of([1, 2, 3]), [1, 2, 8, 4], Verdict([1, 2], [1, 2, 8]), id="part of a chain"),
        pytest.param(tree_of([1, 2, 3]), [8, 2, 3, 4], Verdict([], [8]), id="nothing, the rest is void"),
        pytest.param(tree_of([1], [2], [3]), [2, 5, 6, 7], Verdict([2], [2, 6]), id="one of three siblings"),
        pytest.param(
            tree_of([1, 2], [3, 2], [3, 4, 5]),  # nodes: 1 2 / 3 4 / 5 6
            [3, 2, 0, 4, 0, 5, 7],
            Verdict([3, 5, 6], [3, 4, 5, 7]),
            id="the last of several paths",
        ),
        pytest.param(
            tree_of([1, 2], [1, 3], [1, 3, 6], [1, 2]),  # nodes: 1, 2, 3, 4
            [1, 3, 0, 6, 5],
            Verdict([1, 3, 4], [1, 3, 6, 5]),
            id="guesses that were merged count once",
        ),
        pytest.param(tree_of([9, 9]), [9, 9, 9], Verdict([1, 2], [9, 9, 9]), id="the root's own token again"),
        pytest.param(tree_of([1], [2, 1]), [2, 0, 0, 1], Verdict([2], [2, 0]), id="draws elsewhere are void"),
    ],
)
def test_the_accepted_path_is_the_one_that_was_drawn(
    tree: DraftTree, draws: list[int], verdict: Verdict
) -> None:
    assert match(tree, draws) == verdict


@pytest.mark.parametrize("seed", range(30))
def test_what_is_emitted_is_what_plain_decoding_would_say(seed: int) -> None:
    """The draw after a node is a function of what has been said, however the tree has come about."""
    rng = random.Random(seed)
    tree = DraftTree(0)
    while len(tree) < 14:
        tree.add(rng.randrange(len(tree)), rng.randrange(3))
    say = {tuple(tree.tokens[n] for n in tree.path(node)[1:]): rng.randrange(3) for node in range(len(tree))}
    said: list[int] = []
    while tuple(said) in say:
        said.append(say[tuple(said)])
    draws = [say[tuple(tree.tokens[n] for n in tree.path(node)[1:])] for node in range(len(tree))]
    verdict = match(tree, draws)
    assert verdict.tokens == said
    assert [tree.tokens[node] for node in verdict.path] == said[:-1]
    assert verdict.path == tree.walk(said[:-1])[1:]


class Prophet(NoDrafter):
    """Knows the answers, and guesses a wrong token beside each right one. Checks what it is shown."""

    taps = (2, 0)  # the tiny model's last output, and its embeddings
    max_nodes = 15

    def __init__(self, target: Target, answers: Sequence[Sequence[int]]):
        super().__init__(target)
        self.answers = answers
        self.depths: list[int] = []  # of the trees that were verified

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = []
        for request in requests:
            said = request.tokens.tolist()
            (answer,) = (answer for answer in self.answers if list(answer[: len(said)]) == said)
            tree, node = DraftTree(said[-1]), 0
            for token in answer[len(said) :][:7]:
                tree.add(node, (token + 1) % 97, -1.0)
                node = tree.add(node, token, 0.0)
            trees.append(tree)
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        model = self.target.model
        for seen in observations:
            assert seen.start == seen.request.cached
            rows = Rows(seen.request.tokens[: seen.start + seen.num_pending], 0, None, seen.tree)
            batch = Batch.pack([rows], group=model.spec.group, windows=model.spec.windows)
            hidden, taps = model(batch, taps=self.taps)  # all of it anew, without a cache
            for own, tap in zip(seen.taps, taps, strict=True):
                torch.testing.assert_close(own, tap[seen.start :], rtol=1e-4, atol=1e-4)
            if seen.tree is not None:
                assert len(seen.tree) <= seen.request.max_nodes
                self.depths.append(max(seen.tree.depths))
                logits = model.logits(hidden[batch.logit_rows])
                torch.testing.assert_close(seen.logits, logits, rtol=1e-4, atol=1e-4)
                assert seen.verdict == match(seen.tree, logits.argmax(-1).tolist())


GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[5, 6, 7], [8] * 30, [1, 2, 3, 4, 5, 6]]


def foretold(model: Transformer) -> tuple[LLM, list[Prophet], list[list[int]]]:
    """An LLM with a prophet, a place where he will be found, and what plain decoding says."""
    plain = LLM(model, drafter="none", kv_tokens=256).generate(PROMPTS, GREEDY)
    answers = [result.prompt_token_ids + result.token_ids for result in plain]
    made: list[Prophet] = []

    def make(target: Target) -> Prophet:
        made.append(Prophet(target, answers))
        return made[0]

    return LLM(model, drafter=make, kv_tokens=256, block_size=4, max_rows=40), made, answers


def test_a_drafter_is_shown_its_own_requests_rows_all_of_them(tiny: Make) -> None:
    """In a batch of several requests, with chunks and trees: checked by the prophet himself."""
    llm, made, answers = foretold(tiny(0))
    results = llm.generate(PROMPTS, GREEDY)
    assert [result.prompt_token_ids + result.token_ids for result in results] == answers
    assert max(made[0].depths) == 7
    assert results[0].stats.acceptance[0] == 1.0


def test_no_guess_is_verified_that_could_not_be_said(tiny: Make) -> None:
    llm, made, answers = foretold(tiny(0))
    result = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=11))
    assert result.prompt_token_ids + result.token_ids == answers[0][: 3 + 11]
    assert made[0].depths == [7, 2]  # eight tokens, then three: two guesses and the bonus
    assert (result.stats.accepted, result.stats.emitted, result.stats.steps) == (9, 11, 2)


def test_an_answer_that_ends_amid_right_guesses_keeps_nothing_of_the_rest(tiny: Make) -> None:
    llm, _, answers = foretold(tiny(0))
    answer = answers[0][3:]
    end = next(i for i in range(2, 6) if answer[i] not in answer[:i])
    result = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[answer[end]])
    )
    assert result.token_ids == answer[: end + 1]
    assert result.finish_reason is FinishReason.STOP
    assert (result.stats.accepted, result.stats.emitted) == (end + 1, end + 1)
    assert result.stats.accepted_at == [1] * (end + 1) + [0] * (6 - end)
    assert llm.engine.allocator.num_cached == (3 + end + 1) // 4, "blocks are found by what was said"
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
