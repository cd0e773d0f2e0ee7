"""The shapes of answers: whole and in chunks, of chats and of completions."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from soothsay import __version__
from soothsay.engine.request import FinishReason, Piece, Request, TokenLogprobs
from soothsay.server.loop import News
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
        requests: of the answers. They are looked at only after their news have come.
        texts: of tokens, for log-probabilities.
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
    def news(self, news: News, request: Request) -> list[Json]:
        """Choices of chunks that say what is new."""

    @abstractmethod
    def choice(self, index: int, request: Request, pieces: Sequence[Piece]) -> Json:
        """An answer that has ended, whole."""

    def chunk(self, choices: Sequence[Json], usage: Json | None, *, with_usage: bool) -> Json:
        """A part of a stream."""
        chunk = self._frame(self.chunk_kind, choices)
        return {**chunk, "usage": usage} if with_usage else chunk

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """All of the answers."""
        return {**self._frame(self.kind, choices), "usage": usage}

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

    def news(self, news: News, request: Request) -> list[Json]:
        """Text, calls, and at the end the reason."""
        index = news.index
        reader = self._readers.setdefault(index, self._reader())
        said = [reader.push("".join(piece.text for piece in news.pieces))]
        if news.finish_reason is not None:
            said.append(reader.end())
        content = "".join(part.content for part in said)
        calls = [call for part in said for call in part.calls]
        logprobs = self._logprobs(news.pieces, request)
        delta: Json = {"content": content} if content else {}
        made = self._calls.get(index, 0)
        if calls:
            delta["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(calls, start=made)
            ]
            self._calls[index] = made + len(calls)
        parts = [_part(index, {"delta": delta}, logprobs, None)] if delta or logprobs else []
        if news.finish_reason is not None:
            reason = _reason(news.finish_reason, called=bool(self._calls.get(index)))
            parts.append(_part(index, {"delta": {}}, None, reason))
        return parts

    def choice(self, index: int, request: Request, pieces: Sequence[Piece]) -> Json:
        """The message."""
        reader = self._reader()
        said = [reader.push(request.answer.text), reader.end()]
        content = "".join(part.content for part in said)
        calls = [call for part in said for call in part.calls]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        reason = _reason(request.finish_reason, called=bool(calls))
        part = _part(index, {"message": message}, self._logprobs(pieces, request), reason)
        return {**part, "seed": request.seed}

    def _logprobs(self, pieces: Iterable[Piece], request: Request) -> Json | None:
        if request.params.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(known.token, known.logprob),
                    "top_logprobs": [self._token(*pair) for pair in known.top.items()],
                }
                for known in _told(pieces, request)
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

    def news(self, news: News, request: Request) -> list[Json]:
        """Text, and at the end the reason."""
        text = "".join(piece.text for piece in news.pieces)
        logprobs = self._logprobs(news.index, news.pieces, request)
        if not text and news.finish_reason is None and logprobs is None:
            return []
        return [_part(news.index, {"text": text}, logprobs, _reason(news.finish_reason))]

    def choice(self, index: int, request: Request, pieces: Sequence[Piece]) -> Json:
        """The text."""
        text = (self._echoed[index] if self._echoed else "") + request.answer.text
        logprobs = self._logprobs(index, pieces, request)
        return {
            **_part(index, {"text": text}, logprobs, _reason(request.finish_reason)),
            "seed": request.seed,
        }

    def _logprobs(self, index: int, pieces: Iterable[Piece], request: Request) -> Json | None:
        if request.params.logprobs is None:
            return None
        told = _told(pieces, request)
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


def usage(requests: Sequence[Request], answers_a_prompt: int) -> Json:
    """Tokens read, said and guessed."""
    stats = [request.stats for request in requests]
    steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    read = sum(request.num_prompt for request in requests[::answers_a_prompt])
    said = sum(request.num_output for request in requests)
    found = sum(request.num_prefix_hits for request in requests[::answers_a_prompt])
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
            "mean_accepted": round(emitted / steps, 3) if steps else 0.0,
            "lossless": all(request.params.rule.lossless for request in requests),
        },
    }


def _told(pieces: Iterable[Piece], request: Request) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that are text: not of the one that ended it."""
    return [p.logprobs for p in pieces if p.logprobs is not None and p.token not in request.end_tokens]


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
