"""`/v1/models` and `/props`: which model is served, and within what limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from soothsay import __version__
from soothsay.server.generation.service import Service


def model_routes(service: Service, drafters: Sequence[str]) -> list[Route]:
    """The routes that describe the model. `drafters` are those that a request may choose."""
    started = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": service.config.name,
            "object": "model",
            "created": started,
            "owned_by": "soothsay",
            "type": "model",  # Anthropic's field, like the next two
            "display_name": service.config.name,
            "created_at": datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z"),
            "max_model_len": service.model.max_context,
            "drafters": list(drafters),
        }

    async def models(_: Request) -> Response:
        name = service.config.name
        ends = {"has_more": False, "first_id": name, "last_id": name}  # for Anthropic's clients
        return JSONResponse({"object": "list", "data": [card()], **ends})

    async def model(http: Request) -> Response:
        service.check_model(http.path_params["name"])
        return JSONResponse(card())

    async def props(_: Request) -> Response:
        return JSONResponse(_props(service))

    return [
        *(Route(path, models) for path in ("/v1/models", "/models")),
        Route("/v1/models/{name:path}", model),
        Route("/props", props),
    ]


def _props(service: Service) -> dict[str, Any]:
    """What clients of llama.cpp's server ask for first."""
    model, tokenizer = service.model, service.model.tokenizer
    special = {} if tokenizer is None else tokenizer.special
    settings = {"n_ctx": model.max_context, "params": dict(model.sampling_defaults)}
    return {
        "default_generation_settings": settings,
        "total_slots": model.max_requests,
        "model_alias": service.config.name,
        "chat_template": "" if tokenizer is None else tokenizer.templates.get("default", ""),
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"soothsay {__version__}",
        "is_sleeping": False,
    }
