"""The connections of clients: how many there are, and how long they may wait for a client."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter, OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from soothsay.server.addresses import network
from soothsay.server.api_errors import ApiError
from soothsay.server.server_config import ServerConfig

log = logging.getLogger("soothsay.server")

ACCEPTED = 8
"""Limit of connections that are accepted in one turn of the event loop. A turn takes about 0.1 ms."""

RESERVED = 32 + 4 * ACCEPTED
"""Files that the process keeps for other things than connections: 32 to restart the engine and to read the
file of keys, and four turns' worth of connections that were accepted and not counted yet, or are closing."""

PROBES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between probes of a client that has stopped sending. The last one repeats."""


class Connections:
    """All open connections. Keeps them below the limits.

    A connection that waits for its client is closed to make room for a new one, the oldest first.

    Args:
        config: the limits.
    """

    def __init__(self, config: ServerConfig):
        self.headers_timeout = config.client_timeout
        self.limit = min(config.max_connections, _files_left())
        self._per_address = config.max_connections_per_address
        self._open: set[ClientConnection] = set()
        self._waiting: OrderedDict[ClientConnection, None] = OrderedDict()
        self._by_address: Counter[str] = Counter()
        if self.limit < config.max_connections:
            facts = {"limit": self.limit, "wanted": config.max_connections}
            log.warning("connections are limited by the number of files (ulimit -n)", extra=facts)

    def add(self, connection: ClientConnection) -> None:
        """Count a new connection. Closes another one, or this one, if there are too many."""
        self._open.add(connection)
        self._by_address[connection.address] += 1
        if self._per_address is not None and self._by_address[connection.address] > self._per_address:
            connection.refuse("too many connections come from this address")
        elif len(self._open) <= self.limit:
            self._waiting[connection] = None
        elif self._waiting:
            oldest, _ = self._waiting.popitem(last=False)
            self._forget(oldest)
            oldest.transport.close()
            self._waiting[connection] = None
        else:
            connection.refuse("too many connections are open; try again later")

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self._forget(connection)

    def mark(self, connection: ClientConnection, *, waiting: bool) -> None:
        """Note whether a connection waits for its client. One that waits already keeps its place."""
        if connection not in self._open:
            return
        if waiting:
            self._waiting.setdefault(connection)
        else:
            self._waiting.pop(connection, None)

    def _forget(self, connection: ClientConnection) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]


class ClientConnection(H11Protocol):
    """One connection. It is closed if the headers of a request do not arrive in time.

    Uvicorn waits for ever for the first request's headers, and for later headers that have begun. It gives up
    clients that stop sending (a half-closed connection), although they may still wait for an answer.
    """

    def __init__(self, connections: Connections, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._connections = connections
        self.address = ""
        self._headers_due: asyncio.TimerHandle
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, if there is room for another connection."""
        super().connection_made(transport)
        self.address = network(self.client[0]) if self.client else ""
        self._headers_due = self.loop.call_later(self._connections.headers_timeout, self._give_up)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        due = self._idle and self._headers_due.cancelled()
        super().data_received(data)
        if not self._idle:
            self._headers_due.cancel()
        elif due:
            self._headers_due = self.loop.call_later(self._connections.headers_timeout, self._give_up)
        self._connections.mark(self, waiting=self._waits)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._connections.mark(self, waiting=self._waits)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open although the client sends nothing any more.

        It does if the client has sent a whole request. The client may only have stopped sending, or it may be
        gone. The system of one that is gone replies to a write with a reset, so that the next write fails.
        Until the answer begins, the writes are `100 Continue`, which one that is there ignores. Later they
        are parts of the answer.
        """
        if self._waits or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        self._headers_due.cancel()
        if self._probing is not None:
            self._probing.cancel()
        self._connections.remove(self)
        super().connection_lost(exc)

    def refuse(self, message: str) -> None:
        """Send an error and close the connection, without reading a request."""
        response = ApiError(503, message, "overloaded", headers={"Retry-After": "1"}).response("")
        headers = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\n%sconnection: close\r\n\r\n%s" % (headers, response.body)
        )
        self.transport.close()

    @property
    def _idle(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        """Whether the next thing to come is from the client: headers or a body."""
        return self._idle or self.cycle.more_body

    def _give_up(self) -> None:
        if self._idle:
            self.transport.close()

    def _probe(self, count: int) -> None:
        if self.cycle.response_started or self.conn.our_state is not h11.SEND_RESPONSE:
            return
        event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(event) or b"")
        delay = PROBES[min(count, len(PROBES) - 1)]
        self._probing = self.loop.call_later(delay, self._probe, count + 1)


def _files_left() -> int:
    """Number of connections that this process can open beside the files that it has and needs; at least 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:  # no file is left to list them with
        return 1
    return max(limit - used - RESERVED, 1)
