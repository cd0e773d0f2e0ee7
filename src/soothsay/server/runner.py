"""Runs a `Server` with uvicorn: socket, signals, and a limit of time for headers."""

from __future__ import annotations

import asyncio
import math

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from soothsay.server.app import Server

MAX_HEADERS = 32_768
"""Limit of bytes in a request's headers."""


def make_runner(server: Server, host: str, port: int) -> uvicorn.Server:
    """Make what runs a server. Call its `run()` in the main thread of a process.

    SIGTERM and SIGINT end it after the running answers; a second SIGINT ends it at once.
    """
    config = server.config
    return uvicorn.Server(
        uvicorn.Config(
            server.app,
            host=host,
            port=port,
            http=_protocol_with_timeout(config.client_timeout),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(config.client_timeout),
            timeout_graceful_shutdown=math.ceil(config.drain),
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
    )


def _protocol_with_timeout(seconds: float) -> type[H11Protocol]:
    """A protocol that closes a connection if the headers of a request do not arrive in time.

    Uvicorn waits for ever for the first request's headers, and for later headers that have begun.
    """

    class HeaderTimeoutProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._headers_due = self.loop.call_later(seconds, self._give_up)

        def data_received(self, data: bytes) -> None:
            due = self._idle and self._headers_due.cancelled()
            super().data_received(data)
            if not self._idle:
                self._headers_due.cancel()
            elif due:
                self._headers_due = self.loop.call_later(seconds, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_due.cancel()
            super().connection_lost(exc)

        @property
        def _idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _give_up(self) -> None:
            if self._idle:
                self.transport.close()

    return HeaderTimeoutProtocol
