"""OpenAI's routes: chats, completions, responses and models.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.apis.openai.openai_replies import ChatFormat, CompletionFormat
from soothsay.server.apis.openai.responses_bodies import RENAMED, ResponsesRequest
from soothsay.server.apis.openai.responses_replies import ResponsesFormat
from soothsay.server.generation.reply_format import MakeParser
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest
from soothsay.server.generation.service import ReplyPlan, Service, without_traces
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import Json


def openai_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API. llama.cpp's server has the chats at a path of its own too."""

    def chat(http: Request, body: ChatRequest) -> ReplyPlan:
        name = service.reply_name(body.model)
        return service.chat(http, body, partial(ChatFormat, name, service.texts, body))

    def complete(http: Request, body: CompletionRequest) -> ReplyPlan:
        name = service.reply_name(body.model)
        return service.complete(http, body, partial(CompletionFormat, name, service.texts, body))

    def respond(http: Request, body: ResponsesRequest) -> ReplyPlan:
        chat, echo = without_traces(body.chat()), body.echo()

        def reply(parser: MakeParser) -> ResponsesFormat:
            return ResponsesFormat(service.reply_name(body.model), service.texts, parser, echo)

        return service.chat(http, chat, reply)

    return [
        *(service.post(path, ChatRequest, chat) for path in ("/v1/chat/completions", "/chat/completions")),
        service.post("/v1/completions", CompletionRequest, complete),
        service.post("/v1/responses", ResponsesRequest, respond, names=RENAMED),
        *_model_routes(service),
    ]


def _model_routes(service: Service) -> list[ApiRoute]:
    """The routes that describe the model. Its card also has the fields that Anthropic's clients read."""
    started, names = int(time.time()), service.names

    def card(name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "soothsay",
            "type": "model",  # Anthropic's field, like the next two
            "display_name": name,
            "created_at": datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z"),
            "max_model_len": service.model.max_context,
            "drafters": list(service.drafters),
            **({"parent": names[0]} if service.adapter(name) else {}),
        }

    async def models(_: Request) -> Response:
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # for Anthropic's clients
        return JSONResponse({"object": "list", "data": [card(name) for name in names], **ends})

    async def model(http: Request) -> Response:
        name = http.path_params["name"]
        service.check_model(name)
        return JSONResponse(card(service.adapter(name) or (name if name in names else names[0])))

    return [
        ApiRoute("/v1/models", models, described=True),
        ApiRoute("/models", models),
        ApiRoute("/v1/models/{name:path}", model),
    ]
