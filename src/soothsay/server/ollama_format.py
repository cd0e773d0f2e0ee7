"""Replies of Ollama's API: one JSON object, or one a line."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from soothsay.core.answer import FinishReason
from soothsay.server.api_errors import ApiError
from soothsay.server.events import LINES, to_line
from soothsay.server.jobs import Job
from soothsay.server.protocol import GenerationRequest
from soothsay.server.reply_format import Json, MakeParser, ReplyFormat, TokenTexts, join, list_logprobs
from soothsay.server.reports import usage
from soothsay.server.tools import ToolCall


class OllamaFormat(ReplyFormat):
    """Formats one answer as Ollama does. `parser` makes the parser of tool calls."""

    framing = LINES

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser):
        super().__init__(model, texts)
        self._parser = parser()
        self._reason: FinishReason | None = None

    @abstractmethod
    def content(self, text: str, calls: Sequence[ToolCall]) -> Json:
        """The field of a reply that has the text and the calls."""

    async def stream(self, job: Job, body: GenerationRequest) -> AsyncIterator[Json]:
        """The lines of a stream. The last one has no text, and the counts and durations of the answer."""
        async for text, calls, logprobs in self._parts(job):
            if text or calls or logprobs:
                yield self._reply(text, calls, logprobs, {"done": False})
        yield self._reply("", [], [], self._ending(job))

    async def collect(self, job: Job, body: GenerationRequest) -> Json:
        """Wait for the answer, and return the whole reply."""
        whole, all_calls, all_logprobs = "", list[ToolCall](), list[Json]()
        async for text, calls, logprobs in self._parts(job):
            whole += text
            all_calls += calls
            all_logprobs += logprobs
        return self._reply(whole, all_calls, all_logprobs, self._ending(job))

    def failure(self, error: ApiError) -> Json:
        """The last line of a stream whose job fails."""
        return {"error": error.message}

    async def _parts(self, job: Job) -> AsyncIterator[tuple[str, list[ToolCall], list[Json]]]:
        """Text, calls and log-probabilities of each update."""
        async for update in job:
            self._reason = update.finish_reason
            parts = [self._parser.push(update.text)]
            if update.finish_reason is not None:
                parts.append(self._parser.end())
            yield (*join(parts), list_logprobs(self.texts, update.logprobs or ()))

    def _reply(self, text: str, calls: Sequence[ToolCall], logprobs: list[Json], state: Json) -> Json:
        reply = {"model": self.model, "created_at": timestamp(), **self.content(text, calls)}
        return {**reply, **({"logprobs": logprobs} if logprobs else {}), **state}

    def _ending(self, job: Job) -> Json:
        """Why the answer ended, its counts of tokens, and its durations in nanoseconds."""
        counts, (answer,) = usage(job), job.answers
        first = answer.updated_at if answer.first_at is None else answer.first_at
        return {
            "done": True,
            "done_reason": str(self._reason),
            "total_duration": _nanoseconds(answer.updated_at - job.arrived_at),
            "load_duration": 0,
            "prompt_eval_count": counts["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - job.arrived_at),
            "eval_count": counts["completion_tokens"],
            "eval_duration": _nanoseconds(answer.updated_at - first),
            "speculation": counts["speculation"],
        }


class OllamaChatFormat(OllamaFormat):
    """Formats the answer to `/api/chat`."""

    def content(self, text: str, calls: Sequence[ToolCall]) -> Json:
        """A message."""
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": _arguments(call)}}
                for call in calls
            ]
        return {"message": message}


class OllamaTextFormat(OllamaFormat):
    """Formats the answer to `/api/generate`."""

    def content(self, text: str, calls: Sequence[ToolCall]) -> Json:
        """The text. There are no calls, since there are no tools."""
        return {"response": text}


def timestamp() -> str:
    """The time now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object. What is none, or cannot be sent, becomes its field `value`."""
    try:
        value = json.loads(call.arguments)
        to_line(value).encode()
    except (ValueError, RecursionError):
        value = call.arguments
    return value if isinstance(value, dict) else {"value": value}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
