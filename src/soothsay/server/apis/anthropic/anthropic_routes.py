"""Anthropic's Messages API. A body is turned into that of a chat.

Nothing is stored: each request brings the whole conversation.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.apis.anthropic.anthropic_bodies import RENAMED, AnthropicRequest, PromptRequest
from soothsay.server.apis.anthropic.anthropic_replies import AnthropicFormat
from soothsay.server.generation.reply_format import MakeParser
from soothsay.server.generation.service import ReplyPlan, Service, without_traces
from soothsay.server.http.api_route import ApiRoute


def anthropic_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API."""
    able = service.reasoning is not None

    def reply(parser: MakeParser) -> AnthropicFormat:
        return AnthropicFormat(service.config.name, service.texts, parser, service.model.max_context)

    def answer(http: Request, body: AnthropicRequest) -> ReplyPlan:
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
