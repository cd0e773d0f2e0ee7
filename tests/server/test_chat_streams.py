"""A stream of a chat adds up to the whole answer: its text, calls, log-probabilities and finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from tool_cases import CALL, HERMES, LLAMA, MISTRAL, TOOLS, Told

from soothsay import FinishReason, SpeculationStats, TokenLogprobs
from soothsay.server.apis.openai.openai_replies import ChatFormat
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.generation.reply_format import TokenTexts, as_one
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.http.bodies import Json
from soothsay.server.tools.tool_calls import PlainParser, ToolCallParser
from soothsay.server.tools.tool_readers import HermesParser, Llama3Parser, MistralParser

Format = Callable[[], ToolCallParser]

CASES = [
    *(
        pytest.param(HermesParser, text, told, id=f"hermes-{i}")
        for i, (text, told) in enumerate(HERMES.items())
    ),
    *(
        pytest.param(partial(Llama3Parser, TOOLS), text, told, id=f"llama-{i}")
        for i, (text, told) in enumerate(LLAMA.items())
    ),
    *(
        pytest.param(partial(MistralParser, TOOLS), text, told, id=f"mistral-{i}")
        for i, (text, told) in enumerate(MISTRAL.items())
    ),
    *(pytest.param(PlainParser, text, (text, []), id=f"plain-{i}") for i, text in enumerate(("Hello", CALL))),
]


@dataclass
class Heard:
    """The chunks of one answer, joined as a client joins them."""

    content: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    reason: str | None = None

    def hear(self, choice: Json) -> None:
        """Add the choice of one chunk."""
        assert self.reason is None, "nothing comes after the finish reason"
        delta = choice["delta"]
        self.content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            assert call["index"] == len(self.calls)
            self.calls.append({name: value for name, value in call.items() if name != "index"})
        if choice["logprobs"] is not None:
            self.logprobs += choice["logprobs"]["content"]
        self.reason = choice["finish_reason"]

    def summary(self) -> tuple[Told, list[Json], str | None]:
        """Text and calls, log-probabilities, finish reason. Without the ids of calls, which are random."""
        assert len({call["id"] for call in self.calls}) == len(self.calls)
        assert {call["type"] for call in self.calls} <= {"function"}
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in self.calls]
        return (self.content, calls), self.logprobs, self.reason


def said_in(pieces: Sequence[str], reason: FinishReason, index: int = 0) -> list[AnswerUpdate]:
    """Updates of an answer, with one piece and one token each. The last one has the finish reason."""
    return [
        AnswerUpdate(
            *(0, index, text, [TokenLogprobs(number, -1.0, {})], [], number + 1, 0, 0, 0, SpeculationStats()),
            reason if number == len(pieces) - 1 else None,
        )
        for number, text in enumerate(pieces)
    ]


BODY = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})


def reply(reader: Format) -> ChatFormat:
    return ChatFormat("it", TokenTexts(None), BODY, reader)


def streamed(reader: Format, updates: Sequence[AnswerUpdate]) -> Heard:
    heard, streaming = Heard(), reply(reader)
    for one in updates:
        for choice in streaming.update(one):
            heard.hear(choice)
    return heard


def whole(reader: Format, updates: Sequence[AnswerUpdate]) -> Heard:
    """The answer without streaming, in the same form."""
    choice = reply(reader).choice(as_one(updates))
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert message["content"] or message["content"] == (None if calls else "")
    logprobs = [] if choice["logprobs"] is None else [*choice["logprobs"]["content"]]
    return Heard(message["content"] or "", calls, logprobs, choice["finish_reason"])


def reason_told(told: Told, reason: FinishReason) -> str:
    """The reason is `tool_calls` only if the answer stopped by itself."""
    return "tool_calls" if told[1] and reason is FinishReason.STOP else reason.value


def cuts(text: str) -> list[list[str]]:
    """Ways to cut a text: into characters, into two pieces, and with a last piece that is empty."""
    halves = [[text[:cut], text[cut:]] for cut in range(len(text))]
    return [[text], [*text], [*text, ""], *halves, [text, ""]]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(("reader", "text", "told"), CASES)
def test_a_stream_adds_up_to_the_whole_answer(
    reader: Format, text: str, told: Told, reason: FinishReason
) -> None:
    for pieces in cuts(text):
        updates = said_in(pieces, reason)
        meant, _, why = whole(reader, updates).summary()
        assert (meant, why) == (told, reason_told(told, reason))
        assert streamed(reader, updates).summary() == whole(reader, updates).summary()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_answers_that_come_at_the_same_time_do_not_mix(reason: FinishReason) -> None:
    texts = [*HERMES]
    answers = [said_in([*text], reason, index) for index, text in enumerate(texts)]
    streaming, heard = reply(HermesParser), [Heard() for _ in texts]
    for turn in range(max(map(len, answers))):
        for answer in answers:
            for choice in streaming.update(answer[turn]) if turn < len(answer) else ():
                heard[choice["index"]].hear(choice)
    for text, one in zip(texts, heard, strict=True):
        said, _, why = one.summary()
        assert (said, why) == (HERMES[text], reason_told(HERMES[text], reason))


def test_a_stream_opens_with_the_role_of_every_answer() -> None:
    opening: list[dict[str, Any]] = reply(HermesParser).opening(2)
    assert [choice["index"] for choice in opening] == [0, 1]
    assert [choice["delta"] for choice in opening] == [{"role": "assistant", "content": ""}] * 2
    assert [choice["finish_reason"] for choice in opening] == [None, None]
