"""OpenAI's Responses API: `POST /v1/responses`. A body is turned into that of a chat, so both mean the same.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from soothsay.server.api_errors import ApiError
from soothsay.server.responses_bodies import RENAMED, ResponsesRequest
from soothsay.server.responses_format import ResponsesFormat
from soothsay.server.service import Service

RESPONSES_BODIES = {"/v1/responses": ResponsesRequest}
"""The class of the body of each path."""


def responses_routes(service: Service) -> list[Route]:
    """The routes of this API."""

    async def respond(http: Request) -> Response:
        body = await service.read(http, ResponsesRequest)
        body.check()
        try:
            return await service.chat(
                http,
                body.chat(),
                lambda parser: ResponsesFormat(service.config.name, service.texts, parser, body.echo()),
            )
        except ApiError as error:
            raise error.renamed(RENAMED) from None

    return [Route("/v1/responses", respond, methods=["POST"])]
