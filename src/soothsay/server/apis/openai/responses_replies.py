"""Replies of OpenAI's Responses API: one response, or the events that build it up."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import count
from typing import Any

from soothsay.core.answer import FinishReason
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import (
    MakeParser,
    OneAnswerFormat,
    TokenTexts,
    list_logprobs,
    usage,
)
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import NAMED_EVENTS
from soothsay.server.tools.tool_calls import ParsedPart, ToolCall


class ResponsesFormat(OneAnswerFormat):
    """Formats one answer as a response: thoughts and a message if there are any, then the calls.

    The whole response is that of the last event of the stream. Calls come after all of the text, so that the
    order of items does not depend on how the answer was cut into updates.

    Args:
        model: the model's name in the reply.
        texts: texts of tokens, for log-probabilities.
        parser: makes the parser of thoughts and tool calls.
        echo: fields of the request that the response repeats.
    """

    framing = NAMED_EVENTS

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser, echo: Mapping[str, Any]):
        super().__init__(model, texts, parser)
        self._numbers = count()
        self._response: Json = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "background": False,
            **echo,
        }
        self._item: Json | None = None  # the item with thoughts or text, while it grows
        self._part: Json = {}  # its content
        self._logprobs: list[Json] = []
        self._num_told = 0  # log-probabilities in events so far
        self._items: list[Json] = []  # items that are done

    async def stream(self, job: Job) -> AsyncIterator[Json]:
        """The events of a stream. The last one has the whole response, always with the usage."""
        params = job.params
        self._response |= {"temperature": params.temperature, "top_p": params.top_p}
        self._response["seed"] = job.answers[0].seed
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._snapshot("in_progress"))
        async for part, update in self.parts(job):
            self._logprobs += list_logprobs(self.texts, update.logprobs or (), no_bytes=[])
            for event in self._update(part):
                yield event
        status = "completed" if self.reason is FinishReason.STOP else "incomplete"
        for event in self._end(status):
            yield event
        whole = self._snapshot(status, usage=_usage(job))
        if status == "completed":
            whole["completed_at"] = int(time.time())
        else:
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=whole)

    async def collect(self, job: Job) -> Json:
        """Wait for the answer, and return the whole response."""
        async for event in self.stream(job):
            last = event
        response: Json = last["response"]
        return response

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream whose job fails."""
        problem = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._snapshot("failed", error=problem))

    def _update(self, part: ParsedPart) -> Iterator[Json]:
        if part.reasoning:
            yield from self._begin("reasoning_text")
            yield self._delta(part.reasoning)
        if part.content:
            yield from self._begin("output_text")
            yield self._delta(part.content)

    def _begin(self, kind: str) -> Iterator[Json]:
        """The events that begin an item with a part of a kind, unless it has begun."""
        if self._item is not None and self._part["type"] == kind:
            return
        yield from self._end_item("completed")
        self._part = {"type": kind, "text": ""}
        if kind == "output_text":
            self._item = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
            self._part |= {"annotations": [], "logprobs": []}
        else:
            self._item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
        begun = {**self._item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._part_event("response.content_part.added", part=dict(self._part))

    def _delta(self, text: str) -> Json:
        """The event of more text or thoughts. That of text has the log-probabilities which are new."""
        self._part["text"] += text
        told: Json = {"delta": text}
        if "logprobs" in self._part:
            told["logprobs"] = self._logprobs[self._num_told :]
            self._num_told = len(self._logprobs)
        return self._part_event(f"response.{self._part['type']}.delta", **told)

    def _end_item(self, status: str) -> Iterator[Json]:
        if self._item is None:
            return
        if "logprobs" in self._part and self._num_told < len(self._logprobs):
            yield self._delta("")
        if "logprobs" in self._part:
            self._part["logprobs"] = self._logprobs
        told = {name: self._part[name] for name in ("text", "logprobs") if name in self._part}
        yield self._part_event(f"response.{self._part['type']}.done", **told)
        yield self._part_event("response.content_part.done", part=self._part)
        yield self._item_done({**self._item, "status": status, "content": [self._part]})
        self._item = None

    def _end(self, status: str) -> Iterator[Json]:
        """The events that end the message, and those of the calls. An empty answer is an empty message."""
        if not self.calls and not self._items and self._item is None:
            yield from self._begin("output_text")
        yield from self._end_item(status)
        for call in self.calls:
            yield from self._call(call)

    def _call(self, call: ToolCall) -> Iterator[Json]:
        """The events of one call. It is known only when it is complete, so there is one delta."""
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=place["output_index"], item=begun)
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", **place, delta=call.arguments)
        yield self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments)
        yield self._item_done({**item, "status": "completed", "arguments": call.arguments})

    def _item_done(self, item: Json) -> Json:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> Json:
        assert self._item is not None
        place = {"output_index": len(self._items), "content_index": 0}
        return self._event(kind, item_id=self._item["id"], **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _snapshot(self, status: str, *, error: Json | None = None, usage: Json | None = None) -> Json:
        """The response so far: its items that are done."""
        state = {"status": status, "error": error, "incomplete_details": None, "usage": usage}
        return {**self._response, **state, "output": list(self._items)}


def _usage(job: Job) -> Json:
    """The usage, by this API's names."""
    counts = usage(job)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "speculation": counts["speculation"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
