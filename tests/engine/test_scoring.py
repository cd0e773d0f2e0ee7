"""Log-probabilities of prompts, and requests that only read their prompt."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import soothsay
from soothsay import LLM, FinishReason, SamplingParams, Stream
from soothsay.core.scores import PromptScores
from soothsay.engine import scoring
from soothsay.engine.scoring import SCORED_ROWS
from soothsay.engine.verification import best_logprobs

PROSE = "A man in a blue shirt is standing on a ladder, and the dog below him sees a cat. " * 9


def test_prompt_logprobs_are_those_of_transformers(sibyl: LLM) -> None:
    path = Path(soothsay.__file__).parent / "bundled" / "sibyl"
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    said = sibyl.generate(PROSE, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3))
    ids = said.prompt_token_ids
    assert len(ids) > 2 * SCORED_ROWS
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert said.prompt_logprobs is not None
    assert [one.token for one in said.prompt_logprobs] == ids[1:]
    found = torch.tensor([one.logprob for one in said.prompt_logprobs])
    assert torch.allclose(found, expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4)
    top = torch.tensor([list(one.top.values()) for one in said.prompt_logprobs])
    assert torch.allclose(top, expected.topk(3).values, atol=1e-4)


@pytest.mark.parametrize("engine", [{"max_rows": 7}, {"block_size": 4}, {"prefix_caching": False}])
def test_prompt_logprobs_do_not_depend_on_chunks_and_caches(sibyl: LLM, engine: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    expected = sibyl.generate(PROSE, params)
    llm = LLM("sibyl", dtype="float32", drafter="suffix", kv_tokens=512, max_context=256, **engine)
    kinds = [replace(params, prompt_logprobs=None), params, params, params]
    requests = [request for one in kinds for request in llm.requests(PROSE, one)]
    for request in requests:
        llm.engine.add(request)
    answers = [Stream(llm.engine, request).choice for request in requests]
    assert {answer.text for answer in answers} == {expected.text}
    assert [answer.prompt_logprobs for answer in answers] == [None, *[expected.prompt_logprobs] * 3]
    assert [request.num_prefix_hits for request in requests[1:]] == [0] * 3


def test_no_tokens_are_said_if_none_are_asked_for(sibyl: LLM) -> None:
    said = sibyl.generate(PROSE, SamplingParams(max_tokens=0, n=2, prompt_logprobs=1))
    for choice in said.choices:
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [], FinishReason.LENGTH)
        assert choice.stats.steps == 0
    assert said.prompt_logprobs == sibyl.generate(PROSE, SamplingParams(prompt_logprobs=1)).prompt_logprobs


def test_what_is_known_survives_a_preemption() -> None:
    params = SamplingParams(temperature=0, max_tokens=48, prompt_logprobs=1, ignore_eos=True)
    prompts = [PROSE + str(number) for number in range(3)]
    expected = [LLM("sibyl", dtype="float32", drafter="none").generate(one, params) for one in prompts]
    llm = LLM("sibyl", dtype="float32", drafter="none", kv_tokens=448, max_context=384, max_rows=40)
    requests = [request for prompt in prompts for request in llm.requests(prompt, params)]
    for request in requests:
        llm.engine.add(request)
    answers = [Stream(llm.engine, request).choice for request in requests]
    assert any(request.num_preemptions for request in requests)
    assert [answer.prompt_logprobs for answer in answers] == [one.prompt_logprobs for one in expected]
    assert [answer.text for answer in answers] == [one.text for one in expected]


@pytest.mark.parametrize("engine", [{}, {"prefix_caching": False}, {"max_rows": 40, "kv_tokens": 320}])
def test_answers_to_a_prompt_share_its_scores(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = list[int]()

    def counted(logits: torch.Tensor, *args: Any) -> Any:
        computed.append(len(logits))
        return best_logprobs(logits, *args)

    monkeypatch.setattr(scoring, "best_logprobs", counted)
    options = {"kv_tokens": 1024, "max_context": 256, **engine}
    llm = LLM("sibyl", dtype="float32", drafter="none", **options)
    said = llm.generate(PROSE, SamplingParams(max_tokens=4, n=5, seed=1, prompt_logprobs=2))
    assert sum(computed) == len(said.prompt_token_ids) - 1
    assert said.prompt_logprobs is not None
    assert [one.token for one in said.prompt_logprobs] == said.prompt_token_ids[1:]
    assert all(choice.prompt_logprobs == said.prompt_logprobs for choice in said.choices)
    alone = llm.generate(PROSE, SamplingParams(max_tokens=4, seed=1, prompt_logprobs=2))
    assert (alone.prompt_logprobs, alone.text) == (said.prompt_logprobs, said.text)


def test_scores_take_little_memory_in_the_engine_and_on_their_way() -> None:
    scores, count = PromptScores(), 1000
    numbers = np.arange(20 * count, dtype=np.float32).reshape(count, 20)
    scores.append(list(range(count)), numbers[:, 0], numbers.astype(np.int64), numbers)
    assert len(pickle.dumps(scores)) < 22 * count * 8
    again = pickle.loads(pickle.dumps(scores))
    assert [*again] == [*scores]
    assert (len(again), [one.token for one in again]) == (count, [*range(count)])
    assert [*again][1].top == {int(number): number for number in numbers[1].tolist()}
