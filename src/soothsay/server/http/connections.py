"""The connections of clients: how many there are, and how long they may wait for a client.

A connection is given up with `abort`. `close` would first wait until the client has read everything.
A client must read each part of a reply in time, so a reply has a least speed: `PART` in `client_timeout`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from soothsay.server.http.api_errors import try_later
from soothsay.server.http.json_log import log
from soothsay.server.server_config import ServerConfig, network

ACCEPTED = 8
"""Limit of connections that are accepted in one turn of the event loop. A turn takes about 0.1 ms."""

RESERVED = 32 + 4 * ACCEPTED
"""Files that the process keeps for other things than connections: 32 to restart the engine and to read the
file of keys, and four turns' worth of connections that were accepted and not counted yet, or are closing."""

PART = 1 << 15
"""Bytes of a reply that are sent at once. The client must read each part within `client_timeout`."""

UNREAD = 1.0
"""Seconds in which a client that reads takes the next part. Memory runs short only through slower ones."""

PROBES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between probes of a client that has stopped sending. The last one repeats."""


class Connections:
    """All open connections. Keeps them below the limits.

    A connection that waits for its client is aborted to make room for a new one, the oldest first.

    Args:
        config: the limits.
    """

    def __init__(self, config: ServerConfig):
        self.timeout = config.client_timeout
        self.limit = min(config.max_connections, _files_left())
        self._per_address, self._max_unread = config.max_connections_per_address, config.max_unread
        self._open: set[ClientConnection] = set()
        self._waiting: OrderedDict[ClientConnection, float] = OrderedDict()  # since when
        self._unread: dict[ClientConnection, int] = {}  # bytes of the large replies that are being sent
        if self.limit < config.max_connections:
            facts = {"limit": self.limit, "wanted": config.max_connections}
            log.warning("connections are limited by the number of files (ulimit -n)", extra=facts)

    def add(self, connection: ClientConnection) -> None:
        """Count a new connection. Aborts another one, or refuses this one, if there are too many."""
        self._open.add(connection)
        others = sum(one.address == connection.address for one in self._open) if self._per_address else 0
        if others > (self._per_address or 0):
            connection.refuse("too many connections come from this address")
        elif len(self._open) <= self.limit:
            self.mark(connection, waiting=True)
        elif self._waiting:
            self._abort(next(iter(self._waiting)))
            self.mark(connection, waiting=True)
        else:
            connection.refuse("too many connections are open; try again later")

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self._unread.pop(connection, None)
        self._open.discard(connection)

    def mark(self, connection: ClientConnection, *, waiting: bool) -> None:
        """Note whether a connection waits for its client. One that waits already keeps its place."""
        if connection not in self._open:
            return
        if waiting:
            self._waiting.setdefault(connection, connection.loop.time())
        else:
            self._waiting.pop(connection, None)

    @contextmanager
    def sending(self, connection: ClientConnection, size: int) -> Iterator[None]:
        """Count the bytes of a reply while the block sends it.

        If all replies together are too large, connections are aborted that have not read for `UNREAD`
        seconds, the oldest first.
        """
        self._unread[connection] = size
        late = connection.loop.time() - UNREAD
        slow = [one for one, since in self._waiting.items() if one in self._unread and since < late]
        for one in slow:
            if sum(self._unread.values()) <= self._max_unread:
                break
            self._abort(one)
        try:
            yield
        finally:
            self._unread.pop(connection, None)

    def abort_all(self) -> None:
        """Abort all connections."""
        for connection in [*self._open]:
            self._abort(connection)

    def _abort(self, connection: ClientConnection) -> None:
        self.remove(connection)
        connection.abort()


class ClientConnection(H11Protocol):
    """One connection. It is aborted if the client does not send headers in time, or does not read in time.

    Uvicorn waits for ever for the first request's headers, for later headers that have begun, and for clients
    that do not read. It gives up clients that stop sending (a half-closed connection), although they may
    still wait for an answer.

    A reply is sent in parts. While the client has not read one, nothing else happens: the rest of the reply
    waits, and so does the next request.
    """

    def __init__(self, connections: Connections, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._connections = connections
        self.address = ""
        self.app = self._in_parts(self.app)
        self._is_complete = False  # whether a whole reply was sent and is not read yet
        self._headers_due: asyncio.TimerHandle
        self._reading_due: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, if there is room for another connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of the first unread byte
        bound = transport.get_extra_info("socket")
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does it for some sockets only
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # else the system takes megabytes that nobody reads
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PART)
        self.address = network(self.client[0]) if self.client else ""
        self._headers_due = self.loop.call_later(self._connections.timeout, self._give_up)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        due = self._idle and self._headers_due.cancelled()
        super().data_received(data)
        if due and self._idle:
            self._headers_due = self.loop.call_later(self._connections.timeout, self._give_up)

    def handle_events(self) -> None:
        """Begin a request, or read on in it."""
        super().handle_events()
        if not self._idle:
            self._headers_due.cancel()
        self._mark()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._reading_due = self.loop.call_later(self._connections.timeout, self.abort)
        self._mark()

    def resume_writing(self) -> None:
        """Go on after the client has read everything."""
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()
        if self._is_complete:
            self.on_response_complete()
        self._mark()

    def on_response_complete(self) -> None:
        """Wait for the next request, once the client has read the reply."""
        self._is_complete = self.flow.write_paused and not self.transport.is_closing()
        if not self._is_complete:
            super().on_response_complete()
        self._mark()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open although the client sends nothing any more.

        It does if the client has sent a whole request. The client may only have stopped sending, or it may be
        gone. The system of one that is gone replies to a write with a reset, so that the next write fails.
        Until the answer begins, the writes are `100 Continue`, which one that is there ignores. Later they
        are parts of the answer.
        """
        if self._wants_more or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        for timer in (self._headers_due, self._reading_due, self._probing):
            if timer is not None:
                timer.cancel()
        self._connections.remove(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else the timer holds this object, or it holds itself
        self.app = self.config.loaded_app

    def abort(self) -> None:
        """Close the connection at once, and forget what the client has not read."""
        if self.flow.write_paused:  # the system forgets it too: the client gets a reset
            bound = self.transport.get_extra_info("socket")
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def refuse(self, message: str) -> None:
        """Send an error and close the connection, without reading a request."""
        response = try_later(message).response("")
        headers = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
        start = b"HTTP/1.1 503 Service Unavailable\r\n"
        self.transport.write(b"%s%sconnection: close\r\n\r\n%s" % (start, headers, response.body))
        self.abort()

    @property
    def _idle(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _wants_more(self) -> bool:
        """Whether the client must send something: headers or a body."""
        return self._idle or self.cycle.more_body

    def _mark(self) -> None:
        """Note whether the next step is the client's: to send, or to read."""
        self._connections.mark(self, waiting=self._wants_more or self.flow.write_paused)

    def _give_up(self) -> None:
        if self._idle:
            self.abort()

    def _in_parts(self, app: ASGIApp) -> ASGIApp:
        """An application whose large messages become several ones, since each waits for the one before."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_parts(message: Message) -> None:
                body = memoryview(message.get("body", b""))
                if len(body) <= PART:
                    await send(message)
                    return
                more = message.get("more_body", False)
                with self._connections.sending(self, len(body)):
                    for begin in range(0, len(body), PART):
                        end = begin + PART
                        part = {"body": bytes(body[begin:end]), "more_body": more or end < len(body)}
                        await send({**message, **part})

            await app(scope, receive, send_parts)

        return serve

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
