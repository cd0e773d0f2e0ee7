"""Formats of replies that the bundled model does not produce by itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from soothsay import LLM, FinishReason, SamplingParams, SpeculationStats, Tokenizer
from soothsay.server.apis.openai.openai_replies import ChatFormat
from soothsay.server.engines.engine_messages import AnswerUpdate, RequestOptions
from soothsay.server.fleet.jobs import AnswerProgress, Job
from soothsay.server.generation.reply_format import TokenTexts, timings, usage
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.http import json_streams as events
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import PART, JsonReply
from soothsay.server.tools.tool_readers import HermesParser

BODY = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})


def test_tokens_keep_the_space_they_begin_with() -> None:
    backend = Backend(models.WordLevel({"▁the": 0, "se": 1}, unk_token="se"))
    backend.decoder = decoders.Metaspace()
    texts = TokenTexts(Tokenizer(backend))
    assert Tokenizer(backend).decode([0]) == "the"
    assert [texts(0), texts(1)] == [" the", "se"]
    assert TokenTexts(None)(3) == "token_id:3"


def test_calls_of_one_answer_are_counted_over_chunks() -> None:
    reply = ChatFormat("it", TokenTexts(None), BODY, HermesParser)
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


def test_the_first_token_is_that_of_the_first_update_with_tokens() -> None:
    progress = AnswerProgress(2, 0.0)
    for at, num_output in ((1.0, 0), (2.0, 3), (3.0, 4)):
        progress.take(AnswerUpdate(0, 0, "", None, [], num_output, 0, 0, 0, SpeculationStats(), None), at)
    assert (progress.first_at, progress.updated_at) == (2.0, 3.0)


def test_a_job_may_be_admitted_after_its_deadline() -> None:
    async def run() -> None:
        job = Job([[1, 2]], SamplingParams(), RequestOptions(), "none", 0.0)
        with pytest.raises(ApiError):
            await job.in_time(job.admitted)
        job.admit([7])
        assert job.answers[0].seed == 7

    asyncio.run(run())


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


class Sent:
    """What a response sends. `receive` waits for ever, as for a client that stays."""

    def __init__(self, slow: float = 0.0) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[str] = []
        self._slow = slow

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b"").decode())
            await asyncio.sleep(self._slow)


def items(count: int, made: list[str]) -> Iterator[Json]:
    """Items that note in which thread they were made."""
    for number in range(count):
        made.append(threading.current_thread().name)
        yield {"number": number, "text": "\x85" + "x" * 99}


def test_a_long_reply_is_made_in_parts_and_in_threads() -> None:
    made, sent = list[str](), Sent()
    choices = [{"index": 0, "logprobs": {"content": items(5000, made), "refusal": None}}, {"index": 1}]
    response = JsonReply({"id": "x", "choices": choices, "none": [], "ids": [1, 2]}, {"X-A": "b"})
    asyncio.run(response({"type": "http"}, sent.receive, sent.send))
    meant = {
        "id": "x",
        "choices": [{"index": 0, "logprobs": {"content": [*items(5000, [])], "refusal": None}}, {"index": 1}],
    }
    assert json.loads("".join(sent.parts)) == {**meant, "none": [], "ids": [1, 2]}
    assert "\x85" not in "".join(sent.parts)
    assert max(map(len, sent.parts)) < 2 * PART
    assert len(sent.parts) > 10
    own = threading.current_thread().name
    assert made.count(own) < 400, "those of the first part"
    assert made[-1] != own
    assert (sent.headers["x-a"], sent.headers["content-type"]) == ("b", "application/json")
    assert "content-length" not in sent.headers


def test_a_short_reply_tells_its_length() -> None:
    sent = Sent()
    asyncio.run(JsonReply({"text": "é"})({"type": "http"}, sent.receive, sent.send))
    assert sent.headers["content-length"] == str(len("".join(sent.parts).encode()))


def test_only_pauses_without_a_chunk_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    async def run(sent: Sent) -> None:
        ends = asyncio.Queue[None]()  # of intervals after which the stream looks whether a chunk has come
        silence = events.SILENCE
        monkeypatch.setattr(
            events.asyncio, "sleep", lambda seconds: ends.get() if seconds == silence else sleep(seconds)
        )

        async def settle() -> None:
            for _ in range(10):
                await sleep(0)

        async def chunks() -> AsyncIterator[Json]:
            for number in range(2):
                await settle()
                yield {"number": number}
                for _ in range(3):
                    ends.put_nowait(None)
                    await settle()

        stream = events.EventStream(chunks(), lambda: None, events.LINES, lambda error: error.body)
        await stream({"type": "http", "state": {"record": {}}}, sent.receive, sent.send)

    sent = Sent()
    asyncio.run(run(sent))
    assert "".join(sent.parts) == '{"number":0}\n  {"number":1}\n  '


def test_nothing_comes_between_the_parts_of_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENCE", 0.001)

    async def chunks() -> AsyncIterator[Json]:
        for _ in range(2):
            await asyncio.sleep(0.02)
            yield {"items": items(2000, [])}

    sent = Sent(slow=0.003)
    stream = events.EventStream(chunks(), lambda: None, events.EVENTS, lambda error: error.body)
    asyncio.run(stream({"type": "http", "state": {"record": {}}}, sent.receive, sent.send))
    text = "".join(sent.parts)
    assert ":\n\n" in text, "pauses are filled"
    told = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert told == [{"items": [*items(2000, [])]}] * 2
