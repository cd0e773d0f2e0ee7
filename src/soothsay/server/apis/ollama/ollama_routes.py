"""The routes and replies of Ollama's API, so that its clients can use this server.

Bodies are turned into chats and completions. A reply is one JSON object, or one a line.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.core.answer import TokenLogprobs
from soothsay.server.apis.ollama.ollama_bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
    tagged,
)
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import OneAnswerFormat, gathered, list_logprobs, usage
from soothsay.server.generation.service import ReplyPlan, Service
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import LINES
from soothsay.server.tools.tool_calls import ParsedPart, PlainParser


class OllamaFormat(OneAnswerFormat):
    """Formats one answer as Ollama does."""

    framing = LINES

    @abstractmethod
    def content(self, part: ParsedPart) -> Json:
        """The fields of a reply that have the text, the thoughts and the calls."""

    async def stream(self, job: Job) -> AsyncIterator[Json]:
        """The lines of a stream. The last one has no text, and the counts and durations of the answer."""
        async for part, update in self.parts(job):
            if part.content or part.calls or part.reasoning or update.logprobs:
                yield self._reply(part, update.logprobs or [], {"done": False})
        yield self._reply(ParsedPart(), [], self._ending(job))

    async def collect(self, job: Job) -> Json:
        """Wait for the answer, and return the whole reply."""
        (whole,) = await gathered(job)
        self.reason = whole.finish_reason
        part = self._parser.parse(whole.text, final=True)
        return self._reply(part, whole.logprobs or [], self._ending(job))

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


API_VERSION = "0.12.11"
"""The version of Ollama whose API this follows. Clients compare it with the version that they need."""

NEVER = "9999-12-31T00:00:00Z"
"""When the model will be unloaded."""


def ollama_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API."""
    config, able = service.config, service.reasoning is not None

    def chat(http: Request, body: OllamaChatRequest) -> ReplyPlan | Response:
        if not body.messages:
            return loaded(body, {"message": {"role": "assistant", "content": ""}})
        chat, reply = body.chat(config, able=able), partial(OllamaChatFormat, body.model, service.texts)
        return service.chat(http, chat, reply)

    def generate(http: Request, body: OllamaGenerateRequest) -> ReplyPlan | Response:
        """A model without a chat template continues the prompt, as with `raw`."""
        body.check()
        model, tokenizer = body.model, service.model.tokenizer
        if not body.prompt:
            return loaded(body, {"response": ""})
        if not body.raw and tokenizer is not None and tokenizer.has_chat_template:
            chat, form = body.chat(config, able=able), partial(OllamaTextFormat, model, service.texts)
            return service.chat(http, chat, form)
        reply = OllamaTextFormat(model, service.texts, PlainParser)
        return service.complete(http, body.completion(config), lambda _: reply)

    def loaded(body: OllamaRequest, empty: Json) -> Response:
        """The reply to a request without a prompt, with which clients load a model."""
        service.check_model(body.model)
        reply = {"model": body.model, "created_at": timestamp(), **empty, "done": True, "done_reason": "load"}
        return JSONResponse(reply)

    return [
        service.post("/api/chat", OllamaChatRequest, chat),
        service.post("/api/generate", OllamaGenerateRequest, generate),
        *_model_routes(service),
    ]


def _model_routes(service: Service) -> list[ApiRoute]:
    """The routes that describe the model. Size and digest of its files are unknown here."""
    name, context = tagged(service.config.name), service.model.max_context
    family, unknown = "soothsay", ("parent_model", "format", "parameter_size", "quantization_level")
    details = {"family": family, "families": [family], **dict.fromkeys(unknown, "")}
    card = {
        "name": name,
        "model": name,
        "modified_at": timestamp(),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),  # clients cut it without looking
        "details": details,
    }

    async def tags(_: Request) -> Response:
        names = map(tagged, service.names)
        return JSONResponse({"models": [{**card, "name": name, "model": name} for name in names]})

    async def running(_: Request) -> Response:
        memory = {"expires_at": NEVER, "size_vram": 0, "context_length": context}
        return JSONResponse({"models": [{**card, **memory}]})

    def show(_: Request, body: OllamaShowRequest) -> Response:
        """What the model can do."""
        service.check_model(body.model or body.name)
        able = {"tools": service.tools.supported, "thinking": service.reasoning is not None}
        return JSONResponse(
            {
                "modified_at": card["modified_at"],
                "details": details,
                "model_info": {"general.architecture": family, f"{family}.context_length": context},
                "capabilities": ["completion", *(what for what, can in able.items() if can)],
            }
        )

    async def version(_: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    return [
        service.post("/api/show", OllamaShowRequest, show),
        ApiRoute("/api/tags", tags, described=True),
        ApiRoute("/api/ps", running, described=True),
        ApiRoute("/api/version", version),
    ]
