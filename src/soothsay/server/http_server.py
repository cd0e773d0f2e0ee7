"""The composition root of the server: makes its parts, the table of all routes, and the ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp

from soothsay import __version__
from soothsay.own_process import TIDY_INTERVAL, return_freed_memory
from soothsay.server.access.api_keys import KeyRing
from soothsay.server.access.gate import Gate
from soothsay.server.apis.anthropic.anthropic_routes import anthropic_routes
from soothsay.server.apis.llamacpp.llama_routes import llama_routes
from soothsay.server.apis.llamacpp.token_routes import token_routes
from soothsay.server.apis.ollama.ollama_routes import ollama_routes
from soothsay.server.apis.openai.openai_routes import openai_routes
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.engine_loop import EngineLoop
from soothsay.server.fleet.server_metrics import CONTENT_TYPE, Metrics
from soothsay.server.fleet.watch import Watch, health_routes, replica_routes
from soothsay.server.generation.request_parameters import HEADER
from soothsay.server.generation.service import Service
from soothsay.server.http.api_route import (
    METHODS,
    ApiRoute,
    describe,
    missing_routes,
    no_such_path,
    page_routes,
)
from soothsay.server.server_config import ServerConfig


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
        ApiRoute("/metrics", read_metrics, described=True, operator=True, level=logging.DEBUG),
        ApiRoute("/openapi.json", openapi, counted=True, answers=False),
        *page_routes(),
    ]
    return routes


class Server:
    """Serves one model over HTTP. `app` is the ASGI application.

    Args:
        fleet: the engines, with the model loaded. Nothing else may use them from now on. They end with the
            lifespan of `app`.
        config: limits and names.
        keys: the valid API keys; None: no key is needed.
    """

    def __init__(self, fleet: Fleet, config: ServerConfig, keys: KeyRing | None = None):
        self.fleet, self.model, self.config = fleet, fleet.model, config
        self.metrics = Metrics(config.name)
        self.metrics.describe(self.model.block_size, self.model.num_blocks, self.model.adapters)
        self.loop = EngineLoop(fleet, self.metrics, config)
        self.service = Service(self.loop, self.model, config)
        self.watch = Watch(self.loop, fleet, config)
        self.routes = route_table(self.service, fleet, self.watch, self.metrics, keys)
        router = Router(self.routes, redirect_slashes=False, default=no_such_path, lifespan=self.lifespan)
        self.app: ASGIApp = Gate(router, config, self.metrics.observe_response, keys, self.routes)
        if config.cors_origins:  # outside of the gate, because a browser's preflight request has no key
            self.app = CORSMiddleware(
                self.app,
                allow_origins=config.cors_origins,
                allow_methods=METHODS,
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=["X-Request-Id", "Retry-After", HEADER],
            )

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Serve while the block runs. The engines end with it."""
        self.loop.start()
        tasks = asyncio.create_task(self.watch.run()), asyncio.create_task(_tidy())
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.loop.stop()
        await self.service.stop()


async def _tidy() -> None:
    """Return freed memory to the system, now and then, until cancelled."""
    while True:
        await asyncio.sleep(TIDY_INTERVAL)
        await asyncio.to_thread(return_freed_memory)
