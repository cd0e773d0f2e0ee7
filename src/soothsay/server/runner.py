"""Runs a `Server` with uvicorn: socket, signals and shutdown."""

from __future__ import annotations

import math
import os
import socket
from functools import partial
from typing import Any, cast

import uvicorn

from soothsay.server.app import Server
from soothsay.server.connections import ACCEPTED, ClientConnection, Connections

MAX_HEADERS = 32_768
"""Limit of bytes in a request's headers."""

WAITING = 1024
"""Limit of connections that the operating system holds until they are accepted."""


def make_runner(server: Server, host: str, port: int) -> uvicorn.Server:
    """Make what runs a server. Call its `run()` in the main thread of a process.

    SIGTERM and SIGINT end it after the running answers; a second SIGINT ends it at once.
    """
    config = server.config
    return _Runner(
        uvicorn.Config(
            server.app,
            host=host,
            port=port,
            http=cast(Any, partial(ClientConnection, Connections(config))),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=math.ceil(config.client_timeout),
            timeout_graceful_shutdown=math.ceil(config.drain),
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
    )


class _Runner(uvicorn.Server):
    """Lets more connections wait than are accepted at once. Uvicorn has one number for both."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(WAITING)
