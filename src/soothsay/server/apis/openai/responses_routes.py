"""OpenAI's Responses API: `POST /v1/responses`. A body is turned into that of a chat, so both mean the same.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from soothsay.server.apis.openai.responses_bodies import RENAMED, ResponsesRequest
from soothsay.server.apis.openai.responses_replies import ResponsesFormat
from soothsay.server.generation.reply_format import MakeParser
from soothsay.server.generation.service import Asked, Service
from soothsay.server.http.api_errors import renamed

RESPONSES_BODIES = {"/v1/responses": ResponsesRequest}
"""The class of the body of each path."""


def responses_routes(service: Service) -> list[Route]:
    """The routes of this API."""

    async def respond(http: Request) -> Response:
        def ask(body: ResponsesRequest) -> Asked:
            body.check()

            def reply(parser: MakeParser) -> ResponsesFormat:
                return ResponsesFormat(service.config.name, service.texts, parser, body.echo())

            with renamed(RENAMED):
                return service.chat(http, body.chat(), reply)

        asked = await service.read(http, ResponsesRequest, ask)
        with renamed(RENAMED):
            return await service.answer(http, asked)

    return [Route("/v1/responses", respond, methods=["POST"])]
