"""Routes, their description, and those that need no model: what is missing here, and the page at `/`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from importlib import resources
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from soothsay import __version__
from soothsay.server.http.api_errors import ApiError

Handler = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    """A route.

    Args:
        path, handler: what it serves, and how.
        methods: by default POST if there is a body, else GET.
        body: the class of the body of a POST.
        described: whether `/openapi.json` lists a path without a body.
        keyless: whether it needs no API key.
        operator: whether it is for operators' keys only.
        counted: whether a GET counts as a request of a key. The replies of most have some hundred bytes, or
            are for operators, whose monitors poll them.
        answers: whether a request asks for answers of the model, so that the key's limit of answers holds.
        level: of the log's line about a request that is not refused: `DEBUG` for what is polled.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        methods: Sequence[str] = (),
        body: type[BaseModel] | None = None,
        described: bool = False,
        keyless: bool = False,
        operator: bool = False,
        counted: bool = False,
        answers: bool = True,
        level: int = logging.INFO,
    ):
        super().__init__(path, handler, methods=methods or ("GET" if body is None else "POST",))
        self.body, self.described = body, described
        self.keyless, self.operator, self.counted, self.answers = keyless, operator, counted, answers
        self.level = level


REFERENCE = "#/components/schemas/{model}"


def describe(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The description of the routes that have a body or are to be described, for `GET /openapi.json`."""
    told = [route for route in routes if route.body is not None or route.described]
    kinds = [(kind, "validation") for kind in dict.fromkeys(route.body for route in told) if kind]
    _, schemas = models_json_schema(kinds, ref_template=REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in told:
        method = "get" if route.body is None else "post"
        paths.setdefault(route.path, {})[method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "soothsay", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    answer = {"200": {"description": "The answer"}}
    if route.body is None:
        return {"responses": answer}
    schema = {"$ref": REFERENCE.format(model=route.body.__name__)}
    return {
        "summary": (route.body.__doc__ or "").partition("\n")[0],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {**answer, "4XX": {"description": "An error"}},
    }


NOT_TEXT = {
    "embeddings": ("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"),
    "reranking": ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"),
    "scores": ("/v1/score", "/score", "/pooling", "/classify", "/v1/moderations"),
    "sound": ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    "images": ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
}
"""What this server does not offer, and the paths where clients ask for it."""

ELSEWHERE = {
    "batches are not served over HTTP; soothsay batch answers a file of requests": (
        *("/v1/batches", "/v1/messages/batches", "/v1/files"),
    ),
    "this server has one model; start another server for another one": (
        *("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
    ),
    "adapters are loaded at the start: soothsay serve MODEL --lora NAME=PATH": (
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"),
    ),
}
"""What is done in another way, and the paths where clients ask for it."""

METHODS = ("GET", "POST", "DELETE")

MAX_PATH = 128
"""Limit of characters of a path that an error repeats."""


def missing_routes() -> list[ApiRoute]:
    """The routes that say what is missing."""
    only_text = "this server offers no {}; it only generates text"
    refused = {**{only_text.format(what): paths for what, paths in NOT_TEXT.items()}, **ELSEWHERE}
    return [
        ApiRoute(path, _refusal(message), methods=METHODS)
        for message, paths in refused.items()
        for path in paths
    ]


def _refusal(message: str) -> Handler:
    async def refuse(_: Request) -> Response:
        raise ApiError(404, message, "not_found")

    return refuse


async def no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request for a path that the server does not have. Raises `ApiError`."""
    if scope["type"] == "http":
        message = f"there is no path {scope['path'][:MAX_PATH]} here; GET /openapi.json lists the paths"
        raise ApiError(404, message, "not_found")


START = "index.html"
"""The file at `/`. Each other file is at `/site/` and its name."""

TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The page may load its own files and call its own server. It can never turn text into script."""

HEADERS = {
    "Cache-Control": "no-cache",  # browsers check their copy each time, so a new version shows at once
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[ApiRoute]:
    """One route for each file of the page. No other path is served, so none can leave the folder."""
    site = resources.files("soothsay.server") / "site"
    return [
        _route(one.name, one.read_bytes()) for one in site.iterdir() if PurePath(one.name).suffix in TYPES
    ]


def _route(name: str, content: bytes) -> ApiRoute:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers, kind = {**HEADERS, "ETag": tag}, TYPES[PurePath(name).suffix]

    async def serve(http: Request) -> Response:
        if tag in http.headers.get("if-none-match", ""):  # in quotes, so it is no part of another one
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return ApiRoute("/" if name == START else f"/site/{name}", serve, keyless=True, level=logging.DEBUG)
