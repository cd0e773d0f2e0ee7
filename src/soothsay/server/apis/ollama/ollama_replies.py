"""Replies of Ollama's API: one JSON object, or one a line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from soothsay.core.answer import FinishReason, TokenLogprobs
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import (
    MakeParser,
    ReplyFormat,
    ReplyOptions,
    TokenTexts,
    join,
    list_logprobs,
)
from soothsay.server.generation.reply_reports import usage
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.body_types import Json
from soothsay.server.http.json_streams import LINES
from soothsay.server.tools.tool_calls import ParsedPart


class OllamaFormat(ReplyFormat):
    """Formats one answer as Ollama does. `parser` makes the parser of tool calls."""

    framing = LINES

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser):
        super().__init__(model, texts)
        self._parser = parser()
        self._reason: FinishReason | None = None

    @abstractmethod
    def content(self, part: ParsedPart) -> Json:
        """The fields of a reply that have the text, the thoughts and the calls."""

    async def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """The lines of a stream. The last one has no text, and the counts and durations of the answer."""
        async for part, logprobs in self._parts(job):
            if part.content or part.calls or part.reasoning or logprobs:
                yield self._reply(part, logprobs, {"done": False})
        yield self._reply(ParsedPart(), [], self._ending(job))

    async def collect(self, job: Job, options: ReplyOptions) -> Json:
        """Wait for the answer, and return the whole reply."""
        parts, all_logprobs = list[ParsedPart](), list[TokenLogprobs]()
        async for part, logprobs in self._parts(job):
            parts.append(part)
            all_logprobs += logprobs
        return self._reply(join(parts), all_logprobs, self._ending(job))

    def failure(self, error: ApiError) -> Json:
        """The last line of a stream whose job fails."""
        return {"error": error.message}

    async def _parts(self, job: Job) -> AsyncIterator[tuple[ParsedPart, list[TokenLogprobs]]]:
        """Each update, and its log-probabilities."""
        async for update in job:
            self._reason = update.finish_reason
            parts = [self._parser.push(update.text)]
            if update.finish_reason is not None:
                parts.append(self._parser.end())
            yield join(parts), update.logprobs or []

    def _reply(self, part: ParsedPart, logprobs: list[TokenLogprobs], state: Json) -> Json:
        reply = {"model": self.model, "created_at": timestamp(), **self.content(part)}
        return {**reply, **({"logprobs": list_logprobs(self.texts, logprobs)} if logprobs else {}), **state}

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

    def content(self, part: ParsedPart) -> Json:
        """A message."""
        message: Json = {"role": "assistant", "content": part.content, **_thinking(part)}
        if part.calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.values}}
                for call in part.calls
            ]
        return {"message": message}


class OllamaTextFormat(OllamaFormat):
    """Formats the answer to `/api/generate`."""

    def content(self, part: ParsedPart) -> Json:
        """The text. There are no calls, since there are no tools."""
        return {"response": part.content, **_thinking(part)}


def _thinking(part: ParsedPart) -> Json:
    return {"thinking": part.reasoning} if part.reasoning else {}


def timestamp() -> str:
    """The time now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
