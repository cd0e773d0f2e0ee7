"""Anthropic's Messages API: `POST /v1/messages`. A body is turned into that of a chat.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from soothsay.server.anthropic_bodies import RENAMED, AnthropicRequest, PromptRequest
from soothsay.server.anthropic_format import AnthropicFormat
from soothsay.server.api_errors import ApiError
from soothsay.server.parameters import chosen_tools
from soothsay.server.reply_format import MakeParser
from soothsay.server.service import Service

ANTHROPIC_BODIES: dict[str, type[BaseModel]] = {
    "/v1/messages": AnthropicRequest,
    "/v1/messages/count_tokens": PromptRequest,
}
"""The class of the body of each path."""


def anthropic_routes(service: Service) -> list[Route]:
    """The routes of this API."""

    def decode(ids: Sequence[int], skip_special: bool) -> str:
        return service.prompts.decode(ids, skip_special=skip_special)

    def reply(parser: MakeParser) -> AnthropicFormat:
        room = service.model.max_context
        return AnthropicFormat(service.config.name, service.texts, parser, room, decode)

    async def answer(http: Request) -> Response:
        body = await service.read(http, AnthropicRequest)
        try:
            return await service.chat(http, body.chat(able=service.reasoning is not None), reply)
        except ApiError as error:
            raise error.renamed(RENAMED) from None

    async def count(http: Request) -> Response:
        """How many tokens the prompt of a message would have."""
        body = await service.read(http, PromptRequest)
        service.check_model(body.model)
        try:
            chat = body.chat(able=service.reasoning is not None)
            ids, _ = await service.read_chat(chat, chosen_tools(chat)[0])
        except ApiError as error:
            raise error.renamed(RENAMED) from None
        return JSONResponse({"input_tokens": len(ids)})

    return [
        Route("/v1/messages", answer, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
