"""Ollama's API, so that its clients can use this server. Bodies are turned into chats and completions."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from soothsay.server.apis.ollama.ollama_bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
    tagged,
)
from soothsay.server.apis.ollama.ollama_replies import OllamaChatFormat, OllamaTextFormat, timestamp
from soothsay.server.generation.reply_format import Json
from soothsay.server.generation.request_parameters import sampling_params
from soothsay.server.generation.service import Asked, Service
from soothsay.server.tools.tool_calls import PlainParser

API_VERSION = "0.12.11"
"""The version of Ollama whose API this follows. Clients compare it with the version that they need."""

NEVER = "9999-12-31T00:00:00Z"
"""When the model will be unloaded."""


OLLAMA_BODIES: dict[str, type[BaseModel]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
}
"""The class of the body of each path."""


class OllamaApi:
    """Ollama's API on top of a server.

    Args:
        service: answers chats and completions.
    """

    def __init__(self, service: Service):
        self._service = service
        self._loaded_at = timestamp()

    async def chat(self, http: Request) -> Response:
        """`POST /api/chat`."""
        service = self._service

        def ask(body: OllamaChatRequest) -> Asked | Response:
            if not body.messages:
                return self._loaded(body, {"message": {"role": "assistant", "content": ""}})
            return service.chat(
                http,
                body.chat(service.config, able=service.reasoning is not None),
                lambda parser: OllamaChatFormat(body.model, service.texts, parser),
            )

        asked = await service.read(http, OllamaChatRequest, ask)
        return asked if isinstance(asked, Response) else await service.answer(http, asked)

    async def generate(self, http: Request) -> Response:
        """`POST /api/generate`. A model without a chat template continues the prompt, as with `raw`."""
        service = self._service
        tokenizer = service.model.tokenizer

        def ask(body: OllamaGenerateRequest) -> Asked | Response:
            body.check()
            if not body.prompt:
                return self._loaded(body, {"response": ""})
            if not body.raw and tokenizer is not None and tokenizer.has_chat_template:
                return service.chat(
                    http,
                    body.chat(service.config, able=service.reasoning is not None),
                    lambda parser: OllamaTextFormat(body.model, service.texts, parser),
                )
            completion = body.completion(service.config)
            params = sampling_params(completion, service.config, service.model.sampling_defaults)
            params = replace(params, max_tokens=completion.max_tokens)
            reply = OllamaTextFormat(body.model, service.texts, PlainParser)
            return service.complete(http, completion, params, lambda _: reply)

        asked = await service.read(http, OllamaGenerateRequest, ask)
        return asked if isinstance(asked, Response) else await service.answer(http, asked)

    async def tags(self, _: Request) -> Response:
        """`GET /api/tags`: the models that there are."""
        return JSONResponse({"models": [self._card()]})

    async def running(self, _: Request) -> Response:
        """`GET /api/ps`: the models that are loaded."""
        memory = {"expires_at": NEVER, "size_vram": 0, "context_length": self._service.model.max_context}
        return JSONResponse({"models": [{**self._card(), **memory}]})

    async def show(self, http: Request) -> Response:
        """`POST /api/show`: what the model can do."""
        service = self._service
        service.check_model(await service.read(http, OllamaShowRequest, lambda body: body.model or body.name))
        card = self._card()
        family = card["details"]["family"]
        return JSONResponse(
            {
                "modified_at": card["modified_at"],
                "details": card["details"],
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": self._service.model.max_context,
                },
                "capabilities": [
                    "completion",
                    *(["tools"] if self._service.tools.supported else []),
                    *(["thinking"] if self._service.reasoning is not None else []),
                ],
            }
        )

    async def version(self, _: Request) -> Response:
        """`GET /api/version`."""
        return JSONResponse({"version": API_VERSION})

    def _loaded(self, body: OllamaRequest, empty: Json) -> Response:
        """The reply to a request without a prompt, with which clients load a model."""
        self._service.check_model(body.model)
        reply = {"model": body.model, "created_at": timestamp(), **empty, "done": True, "done_reason": "load"}
        return JSONResponse(reply)

    def _card(self) -> Json:
        """The model, as lists have it. Size and digest of its files are unknown here."""
        name = tagged(self._service.config.name)
        return {
            "name": name,
            "model": name,
            "modified_at": self._loaded_at,
            "size": 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),  # clients cut it without looking
            "details": {
                "parent_model": "",
                "format": "",
                "family": "soothsay",
                "families": ["soothsay"],
                "parameter_size": "",
                "quantization_level": "",
            },
        }


def ollama_routes(service: Service) -> list[Route]:
    """The routes of this API."""
    api = OllamaApi(service)
    return [
        Route("/api/chat", api.chat, methods=["POST"]),
        Route("/api/generate", api.generate, methods=["POST"]),
        Route("/api/show", api.show, methods=["POST"]),
        Route("/api/tags", api.tags),
        Route("/api/ps", api.running),
        Route("/api/version", api.version),
    ]
