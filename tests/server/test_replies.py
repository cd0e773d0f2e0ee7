"""Formats of replies that the bundled model does not produce by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from openai import OpenAI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from soothsay import LLM, FinishReason, SamplingParams, SpeculationStats, Tokenizer
from soothsay.server.jobs import AnswerProgress, Job
from soothsay.server.messages import AnswerUpdate
from soothsay.server.parameters import RequestOptions
from soothsay.server.replies import ChatFormat
from soothsay.server.reply_format import TokenTexts
from soothsay.server.reports import timings, usage
from soothsay.server.tool_readers import HermesParser


def test_tokens_keep_the_space_they_begin_with() -> None:
    backend = Backend(models.WordLevel({"▁the": 0, "se": 1}, unk_token="se"))
    backend.decoder = decoders.Metaspace()
    texts = TokenTexts(Tokenizer(backend))
    assert Tokenizer(backend).decode([0]) == "the"
    assert [texts(0), texts(1)] == [" the", "se"]
    assert TokenTexts(None)(3) == "token_id:3"


def test_calls_of_one_answer_are_counted_over_chunks() -> None:
    reply = ChatFormat("it", TokenTexts(None), HermesParser)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    numbers, reasons = [], []
    for text, reason in ((call, None), (call + call, None), ("", FinishReason.STOP)):
        update = AnswerUpdate(0, 0, text, None, [], 1, 0, 0, 0, SpeculationStats(), reason)
        for choice in reply.update(update):
            numbers += [made["index"] for made in choice["delta"].get("tool_calls", ())]
            reasons.append(choice["finish_reason"])
    assert numbers == [0, 1, 2]
    assert reasons == [None, None, "tool_calls"]


def test_the_token_that_ends_an_answer_has_no_logprobs(client: OpenAI, sibyl: LLM) -> None:
    (end, *_) = sibyl.eos_ids
    said = client.chat.completions.create(
        model="sibyl",
        messages=[{"role": "user", "content": "Hi"}],
        logit_bias={str(end): 100},
        logprobs=True,
    )
    assert said.choices[0].logprobs is not None
    assert said.choices[0].logprobs.content == []
    assert (said.choices[0].finish_reason, said.usage and said.usage.completion_tokens) == ("stop", 1)


def test_usage_counts_a_prompt_once() -> None:
    def answer(prompt: int, said: int, author: str) -> AnswerProgress:
        stats = SpeculationStats(steps=2, emitted=said, drafted=4, accepted=2, accepted_by={author: [1, 1]})
        return AnswerProgress(prompt, 0.0, num_output=said, num_cached=16, stats=stats)

    answers = [answer(20, 3, "a"), answer(20, 5, "b"), answer(30, 4, "b"), answer(30, 4, "b")]
    job: Any = SimpleNamespace(answers=answers, params=SamplingParams(n=2), reports={})
    told = usage(job)
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (50, 16, 66)
    assert told["prompt_tokens_details"] == {"cached_tokens": 32}
    assert told["speculation"] == {
        "drafted": 16,
        "accepted": 8,
        "accepted_by": {"a": 2, "b": 6},
        "mean_accepted": 2.0,
        "lossless": True,
    }


def test_reports_are_made_once_for_each_update() -> None:
    async def run() -> None:
        job = Job([[1, 2]] * 2, SamplingParams(n=2), RequestOptions(), "none", 60.0)
        for report in (usage, timings):
            assert report(job) is report(job)
        before = usage(job)
        update = AnswerUpdate(0, 3, "a", None, [], 7, 1, 0, 0, SpeculationStats(), None)
        job.answers[3].take(update, 1.0)
        job.push(update)
        assert (before["completion_tokens"], usage(job)["completion_tokens"]) == (0, 7)
        assert timings(job)["predicted_n"] == 7

    asyncio.run(run())
