"""What the server offers to the routes of further APIs. They turn their bodies into chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from soothsay.core.params import SamplingParams
from soothsay.server.apis.openai.openai_replies import Echo
from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.generation.prompt_reader import PromptReader
from soothsay.server.generation.reply_format import MakeParser, ReplyFormat, ReplyOptions, TokenTexts
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest
from soothsay.server.generation.request_parameters import RequestOptions
from soothsay.server.http.api_errors import ApiError
from soothsay.server.server_config import ServerConfig
from soothsay.server.tools.reasoning import Thoughts
from soothsay.server.tools.tool_format import ToolFormat

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")

ChatReply = Callable[[MakeParser], ReplyFormat]
"""Makes the format of the reply to a chat, from what makes the parsers of its answers."""

CompletionReply = Callable[[Sequence[Echo]], ReplyFormat]
"""Makes the format of the reply to a completion, from the prompts that the answers begin with (`echo`)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body of a request asks for. It is small; the body is dropped before the answers are made."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    options: RequestOptions
    reply: ReplyFormat
    reply_options: ReplyOptions
    ignored: list[str]  # unknown fields


class Service(Protocol):
    """Answers chats and completions over HTTP. All methods raise `ApiError`."""

    config: ServerConfig
    model: LoadedModel
    texts: TokenTexts
    tools: ToolFormat
    reasoning: Thoughts | None
    prompts: PromptReader

    def check_model(self, name: str | None) -> None:
        """Check that this is the server's model. See `ServerConfig.serves`."""

    async def read(self, http: Request, kind: type[Body], work: Callable[[Body], T]) -> T:
        """Read and check the body of a request, and do what takes long with it. See `BodyReader.read`."""

    def read_chat(self, body: ChatRequest, tools: Sequence[dict[str, Any]]) -> tuple[list[int], str]:
        """Token ids of a conversation in the chat template, and its text. May take long."""

    def chat(self, http: Request, body: ChatRequest, reply: ChatReply) -> Asked:
        """What a conversation asks for. May take long."""

    def complete(
        self, http: Request, body: CompletionRequest, params: SamplingParams, reply: CompletionReply
    ) -> Asked:
        """What a body with prompts asks for, by parameters made of it. May take long."""

    async def answer(self, http: Request, asked: Asked) -> Response:
        """Answer a request."""


def make_body(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Make the body of a chat or a completion, checked as if a client had sent it. Raises `ApiError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ApiError.from_validation(error) from None
