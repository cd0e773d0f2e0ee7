"""Replies of Ollama's API: one JSON object, or one a line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from soothsay.core.answer import TokenLogprobs
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import OneAnswerFormat, ReplyOptions, list_logprobs
from soothsay.server.generation.reply_reports import usage
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.body_types import Json
from soothsay.server.http.json_streams import LINES
from soothsay.server.tools.tool_calls import ParsedPart


class OllamaFormat(OneAnswerFormat):
    """Formats one answer as Ollama does."""

    framing = LINES

    @abstractmethod
    def content(self, part: ParsedPart) -> Json:
        """The fields of a reply that have the text, the thoughts and the calls."""

    async def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """The lines of a stream. The last one has no text, and the counts and durations of the answer."""
        async for part, update in self.parts(job):
            if part.content or part.calls or part.reasoning or update.logprobs:
                yield self._reply(part, update.logprobs or [], {"done": False})
        yield self._reply(ParsedPart(), [], self._ending(job))

    async def collect(self, job: Job, options: ReplyOptions) -> Json:
        """Wait for the answer, and return the whole reply."""
        whole, logprobs = ParsedPart(), list[TokenLogprobs]()
        async for part, update in self.parts(job):
            whole += part
            logprobs += update.logprobs or []
        return self._reply(whole, logprobs, self._ending(job))

    def failure(self, error: ApiError) -> Json:
        """The last line of a stream whose job fails."""
        return {"error": error.message}

    def _reply(self, part: ParsedPart, logprobs: list[TokenLogprobs], state: Json) -> Json:
        reply = {"model": self.model, "created_at": timestamp(), **self.content(part)}
        if logprobs:
            reply["logprobs"] = list_logprobs(self.texts, logprobs)
        return {**reply, **state}

    def _ending(self, job: Job) -> Json:
        """Why the answer ended, its counts of tokens, and its durations in nanoseconds."""
        counts, (answer,) = usage(job), job.answers
        first = answer.updated_at if answer.first_at is None else answer.first_at
        return {
            "done": True,
            "done_reason": str(self.reason),
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
