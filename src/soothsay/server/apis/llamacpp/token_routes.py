"""`/tokenize` and `/detokenize`, in the forms of vLLM's server and of llama.cpp's."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.generation.message_bodies import ChatMessage
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.service import Service
from soothsay.server.http.api_errors import invalid
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import Body, Items, TokenIds
from soothsay.vocabulary.byte_level import BYTE_LETTERS


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a text or a conversation. `content` and `add_special` are llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    with_pieces: bool = False  # whether tokens of `content` come with their texts


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def token_routes(service: Service) -> list[ApiRoute]:
    """The routes that turn texts into token ids and back."""

    def tokenize(_: Request, body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if sum(given is not None for given in (body.prompt, body.content, body.messages)) != 1:
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            ids = service.read_chat(ChatRequest(messages=body.messages))[0]
        else:
            special = body.add_special_tokens if body.content is None else body.add_special
            ids = service.prompts.encode(body.content or body.prompt or "", special=special)
        tokens: list[Any] = list(ids)
        if body.content is not None and body.with_pieces:
            tokens = [_piece(service, token) for token in ids]
        facts = {"count": len(ids), "max_model_len": service.model.max_context, "tokens": tokens}
        return JSONResponse(facts)

    def detokenize(_: Request, body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        if len(body.tokens) > service.model.max_context:
            raise service.prompts.over_long(f"{len(body.tokens)} tokens", "tokens")
        service.prompts.check(body.tokens, "tokens")
        text = service.prompts.decode(body.tokens, skip_special=False)
        return JSONResponse({"prompt": text, "content": text})

    return [
        service.post("/tokenize", TokenizeRequest, tokenize, answers=False),
        service.post("/detokenize", DetokenizeRequest, detokenize, answers=False),
    ]


def _piece(service: Service, token: int) -> dict[str, Any]:
    """A token and its text, or its bytes if it is a part of a character."""
    text = service.texts(token)
    piece: str | list[int] = text
    if "\ufffd" in text:
        piece = _bytes(str(service.prompts.tokenizer.backend.id_to_token(token))) or text
    return {"id": token, "piece": piece}


def _bytes(spelling: str) -> list[int]:
    """The bytes of a token, from its spelling in a vocabulary of bytes. Empty: it has none."""
    if found := re.fullmatch("<0x([0-9A-F]{2})>", spelling):
        return [int(found[1], 16)]
    letters = all(letter in BYTE_LETTERS for letter in spelling)
    return [BYTE_LETTERS[letter] for letter in spelling] if letters else []
