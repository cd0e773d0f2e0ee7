"""Ollama's API, so that its clients can use this server. Bodies are turned into chats and completions."""

from __future__ import annotations

import hashlib
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.apis.ollama.ollama_bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
    tagged,
)
from soothsay.server.apis.ollama.ollama_replies import OllamaChatFormat, OllamaTextFormat, timestamp
from soothsay.server.generation.service import ReplyPlan, Service
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.body_types import Json
from soothsay.server.tools.tool_calls import PlainParser

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
            return service.chat(
                http, body.chat(config, able=able), partial(OllamaTextFormat, model, service.texts)
            )
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
        return JSONResponse({"models": [card]})

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
