"""The table of all routes."""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay import __version__
from soothsay.server.access.api_keys import KeyRing
from soothsay.server.apis.anthropic.anthropic_routes import anthropic_routes
from soothsay.server.apis.llamacpp.llama_routes import llama_routes
from soothsay.server.apis.llamacpp.token_routes import token_routes
from soothsay.server.apis.ollama.ollama_routes import ollama_routes
from soothsay.server.apis.openai.openai_routes import openai_routes
from soothsay.server.fleet.canary import Watch
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.fleet_routes import health_routes, replica_routes
from soothsay.server.fleet.server_metrics import CONTENT_TYPE, Metrics
from soothsay.server.generation.service import Service
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.missing_routes import missing_routes
from soothsay.server.http.openapi import describe
from soothsay.server.http.page_routes import page_routes


def route_table(
    service: Service, fleet: Fleet, watch: Watch, metrics: Metrics, keys: KeyRing | None
) -> list[ApiRoute]:
    """All routes of a server."""

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def read_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @cache
    def description() -> bytes:
        return bytes(JSONResponse(describe(routes)).body)

    async def openapi(_: Request) -> Response:
        return Response(description(), media_type="application/json")

    routes = [
        *openai_routes(service),
        *anthropic_routes(service),
        *ollama_routes(service),
        *llama_routes(service),
        *token_routes(service),
        *missing_routes(),
        *health_routes(fleet, watch, keys),
        *replica_routes(fleet, service.bodies),
        ApiRoute("/version", version, described=True),
        ApiRoute("/metrics", read_metrics, described=True, operator=True),
        ApiRoute("/openapi.json", openapi, counted=True, answers=False),
        *page_routes(),
    ]
    return routes
