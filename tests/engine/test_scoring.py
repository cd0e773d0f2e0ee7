"""Log-probabilities of prompts, and requests that only read their prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import soothsay
from soothsay import LLM, FinishReason, SamplingParams, Stream
from soothsay.engine.scoring import SCORED_ROWS

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
