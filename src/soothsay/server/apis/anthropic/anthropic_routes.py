"""Anthropic's Messages API: `POST /v1/messages`. A body is turned into that of a chat.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from soothsay.server.apis.anthropic.anthropic_bodies import RENAMED, AnthropicRequest, PromptRequest
from soothsay.server.apis.anthropic.anthropic_replies import AnthropicFormat
from soothsay.server.generation.reply_format import MakeParser
from soothsay.server.generation.request_parameters import chosen_tools
from soothsay.server.generation.service import Asked, Service
from soothsay.server.http.api_errors import renamed

ANTHROPIC_BODIES: dict[str, type[BaseModel]] = {
    "/v1/messages": AnthropicRequest,
    "/v1/messages/count_tokens": PromptRequest,
}
"""The class of the body of each path."""


def anthropic_routes(service: Service) -> list[Route]:
    """The routes of this API."""

    def reply(parser: MakeParser) -> AnthropicFormat:
        return AnthropicFormat(service.config.name, service.texts, parser, service.model.max_context)

    async def answer(http: Request) -> Response:
        def ask(body: AnthropicRequest) -> Asked:
            return service.chat(http, body.chat(able=service.reasoning is not None), reply)

        with renamed(RENAMED):
            return await service.answer(http, await service.read(http, AnthropicRequest, ask))

    async def count(http: Request) -> Response:
        """How many tokens the prompt of a message would have."""

        def work(body: PromptRequest) -> Response:
            service.check_model(body.model)
            chat = body.chat(able=service.reasoning is not None)
            ids, _ = service.read_chat(chat, chosen_tools(chat)[0])
            return JSONResponse({"input_tokens": len(ids)})

        with renamed(RENAMED):
            return await service.read(http, PromptRequest, work)

    return [
        Route("/v1/messages", answer, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
