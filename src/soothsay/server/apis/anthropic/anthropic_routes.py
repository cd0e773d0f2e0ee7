"""The routes and replies of Anthropic's Messages API. A body is turned into that of a chat.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.core.answer import FinishReason
from soothsay.server.apis.anthropic.anthropic_bodies import RENAMED, AnthropicRequest, PromptRequest
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import MakeParser, OneAnswerFormat, TokenTexts, usage
from soothsay.server.generation.service import ReplyPlan, Service, without_traces
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import NAMED_EVENTS, to_line
from soothsay.server.tools.tool_calls import ParsedPart


class AnthropicFormat(OneAnswerFormat):
    """Formats one answer as a message: blocks of thoughts and text as they come, and then the calls.

    The whole message is what the events of the stream add up to. Calls come after all of the text, so that
    the order of blocks does not depend on how the answer was cut into updates.

    Args:
        model: the model's name in the reply.
        texts: see `ReplyFormat`.
        parser: makes the parser of thoughts and tool calls.
        max_context: tokens of prompt and answer.
    """

    framing = NAMED_EVENTS

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser, max_context: int):
        super().__init__(model, texts, parser)
        self._max_context = max_context
        self._id = f"msg_{secrets.token_hex(12)}"
        self._content: list[Json] = []  # blocks; the last one grows while it is open
        self._is_open = False

    async def stream(self, job: Job) -> AsyncIterator[Json]:
        """The events of a stream. The last but one has the reason of the end and the usage."""
        begun = {**_usage(job), "output_tokens": 0}  # the engine may be ahead of this stream
        yield {"type": "message_start", "message": self._message(begun, None, None)}
        async for part, _ in self.parts(job):
            for event in self._update(part):
                yield event
        for event in self._end():
            yield event
        why, word = self._reason(job)
        end = {"stop_reason": why, "stop_sequence": word}
        yield {"type": "message_delta", "delta": end, "usage": _usage(job)}
        yield {"type": "message_stop"}

    async def collect(self, job: Job) -> Json:
        """Wait for the answer, and return the whole message."""
        async for _ in self.stream(job):
            pass
        return self._message(_usage(job), *self._reason(job))

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream whose job fails."""
        return error.anthropic_body

    def _update(self, part: ParsedPart) -> Iterator[Json]:
        if part.reasoning:
            yield from self._grow("thinking", part.reasoning, signature="")
        if part.content:
            yield from self._grow("text", part.content)

    def _grow(self, kind: str, text: str, **fields: str) -> Iterator[Json]:
        """The event of more text or thoughts, after those that begin a new block if the last one is another.

        `fields` are further ones of the block. The field with the text has the name of the kind.
        """
        if not self._is_open or self._content[-1]["type"] != kind:
            yield from self._begin({"type": kind, kind: "", **fields})
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._stop()
        self._content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Iterator[Json]:
        """The event that ends the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _end(self) -> Iterator[Json]:
        """The events that end the text, and those of the calls. A call is known only when it is complete."""
        for call in self.calls:
            values = call.values
            yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._content[-1]["input"] = values
            yield self._delta({"type": "input_json_delta", "partial_json": to_line(values)})
        yield from self._stop()

    def _reason(self, job: Job) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        if self.reason is FinishReason.LENGTH:
            (answer,) = job.answers
            full = answer.num_prompt + answer.num_output >= self._max_context
            limited = answer.num_output == job.params.max_tokens
            return "model_context_window_exceeded" if full and not limited else "max_tokens", None
        if self.stop:
            return "stop_sequence", self.stop
        return "tool_use" if self.calls else "end_turn", None

    def _message(self, usage: Json, reason: str | None, word: str | None) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._content),
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": usage,
        }


def _usage(job: Job) -> Json:
    """The usage, by this API's names. Tokens of the prompt that were cached are not among the input."""
    counts = usage(job)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "speculation": counts["speculation"],
    }


def anthropic_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API."""
    able = service.reasoning is not None

    def answer(http: Request, body: AnthropicRequest) -> ReplyPlan:
        def reply(parser: MakeParser) -> AnthropicFormat:
            name = service.reply_name(body.model)
            return AnthropicFormat(name, service.texts, parser, service.model.max_context)

        return service.chat(http, without_traces(body.chat(able=able)), reply)

    def count(_: Request, body: PromptRequest) -> Response:
        """How many tokens the prompt of a message would have."""
        service.check_model(body.model)
        ids = service.read_chat(body.chat(able=able))[0]
        return JSONResponse({"input_tokens": len(ids)})

    return [
        service.post("/v1/messages", AnthropicRequest, answer, names=RENAMED),
        service.post("/v1/messages/count_tokens", PromptRequest, count, names=RENAMED, answers=False),
    ]
