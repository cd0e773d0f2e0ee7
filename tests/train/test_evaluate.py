"""Accepted tokens, against a count by hand of what the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest

from soothsay import LLM, Drafter, DrafterError, DraftTree, Request, RequestError, SamplingParams, Target
from soothsay.drafters.lookup.exact_matches import PromptLookup
from soothsay.train.evaluate import mean_accepted, measuring

TEXTS = ["Hello!", "The river floods the meadows. The river floods", "A man in a blue shirt is"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("sibyl", dtype="float32", drafter="none", config=measuring(2), kv_tokens=2048)


@pytest.fixture(scope="module")
def prompts(sibyl: LLM) -> list[list[int]]:
    assert sibyl.tokenizer is not None
    return [sibyl.tokenizer.encode(text) for text in TEXTS]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[list[int]]:
    """Answers to the prompts, one after the other."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, seed=seed + i) for i in range(len(prompts))
    ]
    return [llm.generate(list(prompt), one).token_ids for prompt, one in zip(prompts, params, strict=True)]


class Knowing(Drafter):
    """Knows the answers of the requests with these seeds, `depth` tokens ahead."""

    def __init__(self, target: Target, answers: dict[int, list[int]], depth: dict[int, int]):
        self.answers, self.depth = answers, depth
        self.max_nodes = 1 + max(depth.values())

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = []
        for request in requests:
            tree = DraftTree(int(request.tokens[-1]))
            known = self.answers[request.seed][request.num_output :]
            tree.extend(known[: self.depth[request.seed]])
            trees.append(tree)
        return trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_over_steps(temperature: float, llm: LLM, prompts: list[list[int]]) -> None:
    said = answers(llm, prompts, temperature, seed=7)
    depth = {7: 1, 8: 2, 9: 3}
    known = {7 + i: answer for i, answer in enumerate(said)}
    accepted = mean_accepted(
        llm,
        lambda target: Knowing(target, known, depth),
        prompts,
        temperature=temperature,
        max_tokens=24,
        seed=7,
    )
    lengths = [len(answer) for answer in said]
    first = [min(1 + depth[7 + i], length) for i, length in enumerate(lengths)]  # the pass over the prompt
    behind = [length - count for length, count in zip(lengths, first, strict=True)]
    steps = [ceil(length / (1 + depth[7 + i])) for i, length in enumerate(behind)]
    assert accepted == sum(behind) / sum(steps)
    assert not llm.engine.has_work


def test_it_can_be_repeated_and_a_drafter_is_new_each_time(llm: LLM, prompts: list[list[int]]) -> None:
    built: list[Drafter] = []

    def looking(target: Target) -> Drafter:
        built.append(PromptLookup(target))
        return built[-1]

    runs = [mean_accepted(llm, looking, prompts, temperature=1.0, seed=3, max_tokens=24) for _ in range(2)]
    assert len(built) == 2
    assert runs[0] == runs[1]
    assert mean_accepted(llm, "none", prompts, max_tokens=24) == 1.0
    assert mean_accepted(llm, looking, prompts, temperature=1.0, seed=4, max_tokens=24) != runs[0]


def test_prompts_without_room_count_for_nothing(llm: LLM, prompts: list[list[int]]) -> None:
    long = [5] * 3000
    lookup = "prompt-lookup(min_ngram=1)"
    alone = mean_accepted(llm, lookup, [prompts[1]], max_tokens=24, seed=1)
    assert mean_accepted(llm, lookup, [long, prompts[1]], max_tokens=24) == alone > 1
    with pytest.raises(RequestError, match="none of 1 prompts can be answered: the prompt has 3000 tokens"):
        mean_accepted(llm, "none", [long])
    with pytest.raises(RequestError, match="none of 0 prompts can be answered"):
        mean_accepted(llm, "none", [])


def test_what_is_refused(llm: LLM, prompts: list[list[int]]) -> None:
    with pytest.raises(DrafterError, match="drafter 'nobody' is unknown"):
        mean_accepted(llm, "nobody", prompts)
