"""Runs a `Server` with uvicorn: sockets, signals and shutdown."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn

from soothsay.errors import SoothsayError
from soothsay.server.http.connections import ACCEPTED, ClientConnection, Connections
from soothsay.server.http.json_log import log
from soothsay.server.http_server import Server

HINTS = {
    errno.EADDRINUSE: "another program has it; stop that one, or choose another with --port",
    errno.EADDRNOTAVAIL: "this machine does not have that address; --host 0.0.0.0 means all that it has",
    errno.EACCES: "this user may not have it; choose one from 1024 on with --port",
}
"""What to do, by the error that the system reports."""


@contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind a port of this machine. Clients are refused until somebody listens on the sockets.

    The sockets are closed at the end.

    Args:
        host: an address or a name. A name may have several addresses; each has a socket.
        port: the port; 0: any free port, which may be another one for each address.

    Raises `SoothsayError` if the port or the address is not to be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SoothsayError(f"the host {host!r} has no address ({error}); check --host") from None
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                sockets.append(bound := stack.enter_context(socket.socket(family, kind, protocol)))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind(address)
        except OSError as error:
            hint = HINTS.get(error.errno or 0, os.strerror(error.errno or 0))
            raise SoothsayError(f"port {port} of {host} cannot be used: {hint}") from None
        yield sockets


MAX_HEADERS = 32_768
"""Limit of bytes in a request's headers."""

LAST_WORDS = 2
"""Seconds in which answers that are given up at the end can tell their clients so."""

WAITING = 1024
"""Limit of connections that the operating system holds until they are accepted."""


def make_runner(server: Server, host: str, port: int) -> uvicorn.Server:
    """Make what runs a server. Call its `run()` in the main thread of a process.

    SIGTERM and SIGINT end it after the running answers; a second SIGINT ends it at once.
    """
    config = server.config
    connections = Connections(config)
    return _Runner(
        server,
        connections,
        uvicorn.Config(
            server.app,
            host=host,
            port=port,
            http=cast(Any, partial(ClientConnection, connections)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=list(config.trusted_proxies),
            backlog=ACCEPTED,
            timeout_keep_alive=math.ceil(config.client_timeout),
            timeout_graceful_shutdown=math.ceil(config.drain) + LAST_WORDS,
            h11_max_incomplete_event_size=MAX_HEADERS,
        ),
    )


class _Runner(uvicorn.Server):
    """Lets more connections wait than are accepted at once, and tells clients why answers are cut short.

    Uvicorn has one number for both kinds of connections, and closes them without a word.
    """

    def __init__(self, server: Server, connections: Connections, config: uvicorn.Config):
        super().__init__(config)
        self._server, self._connections = server, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():  # uvicorn tells only of sockets that it has bound itself
            host, port = bound.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("listening", extra={"address": address})
        for server in self.servers:
            for listening in server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server = self._server
        log.info("ending", extra={"drain": server.config.drain})
        late = asyncio.get_running_loop().call_later(server.config.drain, server.loop.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
        if self.force_exit:  # uvicorn then leaves all tasks as they are, and each would end with a traceback
            server.loop.give_up()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    while self.server_state.tasks:
                        await asyncio.sleep(0.01)
                    await self.lifespan.shutdown()
        self._connections.abort_all()  # of clients that do not read
        await asyncio.sleep(0)
        log.info("ended")
