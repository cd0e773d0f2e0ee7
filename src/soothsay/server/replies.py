"""The shapes of answers: whole and in chunks, of chats and of completions."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from soothsay import __version__
from soothsay.engine.answer import FinishReason, StepTrace, TokenLogprobs
from soothsay.server.loop import Job
from soothsay.server.messages import News
from soothsay.server.tools import Reader, ToolCall
from soothsay.tokenizer import Tokenizer

Json = dict[str, Any]


class TokenTexts:
    """What single tokens say, beginning with a space where they do. Remembered: there are only so many."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text of a token. Part of a character is U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:
            # alone, a token may lose the space that it begins with; behind itself it does not
            first = self._tokenizer.decode([token], skip_special=False)
            both = self._tokenizer.decode([token, token], skip_special=False)
            self._texts[token] = both[len(first) :]
        return self._texts[token]


class Reply(ABC):
    """The answers to one request of HTTP.

    Args:
        model: as clients call it.
        texts: of tokens, for log-probabilities and traces.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, texts: TokenTexts):
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model, self.texts = model, texts

    @abstractmethod
    def opening(self, count: int) -> list[Json]:
        """Choices of chunks that come before all news."""

    @abstractmethod
    def news(self, news: News) -> list[Json]:
        """Choices of chunks that say what is new."""

    @abstractmethod
    def choice(self, index: int, seed: int, said: Sequence[News]) -> Json:
        """An answer that has ended, whole: all that was said, and with which seed."""

    def chunk(self, choices: Sequence[Json], usage: Json | None, *, with_usage: bool) -> Json:
        """A part of a stream."""
        chunk = self._frame(self.chunk_kind, choices)
        return {**chunk, "usage": usage} if with_usage else chunk

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """All of the answers."""
        return {**self._frame(self.kind, choices), "usage": usage}

    def _traced(self, part: Json, traces: Sequence[StepTrace]) -> Json:
        """A choice of a chunk with the steps that brought it, if they are to be told."""
        if not traces:
            return part
        return {**part, "speculation": {"steps": [self._step(trace) for trace in traces]}}

    def _step(self, trace: StepTrace) -> Json:
        return {
            "tokens": [self.texts(token) for token in trace.tokens],
            "parents": trace.parents,
            "drafters": trace.authors,
            "accepted": trace.path,
            "bonus": self.texts(trace.bonus),
        }

    def _frame(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"soothsay-{__version__}",
            "choices": list(choices),
        }


class ChatReply(Reply):
    """Answers to a conversation. `reader` makes what finds calls of tools in one answer."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, texts: TokenTexts, reader: Callable[[], Reader]):
        super().__init__(model, texts)
        self._reader = reader
        self._readers: dict[int, Reader] = {}
        self._calls: dict[int, int] = {}  # made so far, of an answer

    def opening(self, count: int) -> list[Json]:
        """Who speaks."""
        return [
            _part(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
            for index in range(count)
        ]

    def news(self, news: News) -> list[Json]:
        """Text, calls, and at the end the reason."""
        index = news.index
        reader = self._readers.setdefault(index, self._reader())
        said = [reader.push(news.text)]
        if news.finish_reason is not None:
            said.append(reader.end())
        content = "".join(part.content for part in said)
        calls = [call for part in said for call in part.calls]
        logprobs = self._logprobs(news.logprobs)
        delta: Json = {"content": content} if content else {}
        made = self._calls.get(index, 0)
        if calls:
            delta["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(calls, start=made)
            ]
            self._calls[index] = made + len(calls)
        parts = []
        if delta or logprobs or news.traces:
            parts.append(self._traced(_part(index, {"delta": delta}, logprobs, None), news.traces))
        if news.finish_reason is not None:
            reason = _reason(news.finish_reason, called=bool(self._calls.get(index)))
            parts.append(_part(index, {"delta": {}}, None, reason))
        return parts

    def choice(self, index: int, seed: int, said: Sequence[News]) -> Json:
        """The message."""
        reader = self._reader()
        read = [reader.push(_text(said)), reader.end()]
        content = "".join(part.content for part in read)
        calls = [call for part in read for call in part.calls]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        reason = _reason(said[-1].finish_reason, called=bool(calls))
        part = _part(index, {"message": message}, self._logprobs(_logprobs(said)), reason)
        return {**part, "seed": seed}

    def _logprobs(self, told: Sequence[TokenLogprobs] | None) -> Json | None:
        if told is None:
            return None
        return {
            "content": [
                {
                    **self._token(known.token, known.logprob),
                    "top_logprobs": [self._token(*pair) for pair in known.top.items()],
                }
                for known in told
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        text = self.texts(token)
        spelt = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelt}


class CompletionReply(Reply):
    """Texts that go on. `echoed`: for each answer the prompt, where it is to be said again."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, texts: TokenTexts, echoed: Sequence[str] = ()):
        super().__init__(model, texts)
        self._echoed = echoed
        self._offsets: dict[int, int] = {}  # characters told of, of an answer

    def opening(self, count: int) -> list[Json]:
        """The prompts, if they are to be said again."""
        return [_part(index, {"text": text}, None, None) for index, text in enumerate(self._echoed)]

    def news(self, news: News) -> list[Json]:
        """Text, and at the end the reason."""
        logprobs = self._logprobs(news.index, news.logprobs)
        if not news.text and news.finish_reason is None and logprobs is None and not news.traces:
            return []
        part = _part(news.index, {"text": news.text}, logprobs, _reason(news.finish_reason))
        return [self._traced(part, news.traces)]

    def choice(self, index: int, seed: int, said: Sequence[News]) -> Json:
        """The text."""
        text = (self._echoed[index] if self._echoed else "") + _text(said)
        logprobs = self._logprobs(index, _logprobs(said))
        part = _part(index, {"text": text}, logprobs, _reason(said[-1].finish_reason))
        return {**part, "seed": seed}

    def _logprobs(self, index: int, told: Sequence[TokenLogprobs] | None) -> Json | None:
        if told is None:
            return None
        tokens = [self.texts(known.token) for known in told]
        offset, offsets = self._offsets.get(index, 0), []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [known.logprob for known in told],
            "top_logprobs": [
                {self.texts(token): logprob for token, logprob in known.top.items()} for known in told
            ],
            "text_offset": offsets,
        }


def usage(job: Job) -> Json:
    """Tokens read, said and guessed, as far as is known."""
    answers = job.answers
    stats = [answer.stats for answer in answers]
    steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    first = answers[:: job.params.n]  # of each prompt
    read, found = sum(answer.read for answer in first), sum(answer.found for answer in first)
    said = sum(answer.said for answer in answers)
    accepted_by: Counter[str] = Counter()
    for one in stats:
        accepted_by.update({author: sum(counts) for author, counts in one.accepted_by.items()})
    return {
        "prompt_tokens": read,
        "completion_tokens": said,
        "total_tokens": read + said,
        "prompt_tokens_details": {"cached_tokens": found},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "drafted": drafted,
            "accepted": accepted,
            "accepted_by": dict(accepted_by),
            "mean_accepted": round(emitted / steps, 3) if steps else 0.0,
            "lossless": job.params.rule.lossless,
        },
    }


def _text(said: Sequence[News]) -> str:
    return "".join(news.text for news in said)


def _logprobs(said: Sequence[News]) -> list[TokenLogprobs] | None:
    """All of them; None: not asked for."""
    parts = [news.logprobs for news in said if news.logprobs is not None]
    return [known for part in parts for known in part] if parts else None


def _part(index: int, said: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reason(reason: FinishReason | None, *, called: bool = False) -> str | None:
    if reason is FinishReason.STOP and called:
        return "tool_calls"
    return None if reason is None else str(reason)
