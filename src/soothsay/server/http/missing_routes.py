"""Paths of other servers for what this one does not do. Each says so, and what to do instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.api_route import ApiRoute, Handler

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
    "this server has no adapters; merge one into the model's files": (
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
