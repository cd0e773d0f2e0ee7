"""Clients that do not read their replies, or read slowly: they keep neither connections nor memory."""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from soothsay.server import runner
from soothsay.server.http import connections
from soothsay.server.http.connections import PART
from soothsay.server.runner import make_runner
from soothsay.server.server_config import ServerConfig

LARGE = 12 << 20
"""Bytes of a reply that no system buffers as a whole."""


@dataclass
class Site:
    """A server without a model."""

    port: int
    runner: uvicorn.Server
    begun: list[str] = field(default_factory=list)  # paths of requests

    @property
    def open(self) -> list[Any]:
        """Connections that are open."""
        return [*self.runner.server_state.connections]

    def served(self) -> bool:
        """Whether a client that reads gets a reply."""
        return httpx.get(f"http://127.0.0.1:{self.port}/small", timeout=10).text == "x" * 20_000

    def wait_until(self, true: Callable[[], bool], seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it has not happened"
            time.sleep(0.005)


@contextmanager
def site(**limits: Any) -> Iterator[Site]:
    begun: list[str] = []

    async def small(http: Request) -> Response:
        begun.append(http.url.path)
        return PlainTextResponse("x" * 20_000)

    async def large(http: Request) -> Response:
        begun.append(http.url.path)
        return Response(bytes(LARGE))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b"data: x\n\n" * 1000

    async def stream(_: Request) -> Response:
        return StreamingResponse(endless())

    async def patient(http: Request) -> Response:
        while not await http.is_disconnected():
            await asyncio.sleep(0.005)
        return Response()

    pages = {"/small": small, "/large": large, "/stream": stream, "/patient": patient}
    app = Starlette(routes=[Route(path, page) for path, page in pages.items()])
    config = ServerConfig(name="x", **{"client_timeout": 60.0, **limits})
    server: Any = SimpleNamespace(app=app, config=config, loop=SimpleNamespace(give_up=lambda: None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        runner = make_runner(server, "127.0.0.1", 0)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield Site(listening.getsockname()[1], runner, begun)
        finally:
            runner.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def connected(where: Site, sent: bytes = b"") -> socket.socket:
    """A client with small buffers that has sent something."""
    client = socket.socket()
    client.settimeout(10)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", where.port))
    with suppress(TimeoutError, ConnectionError):
        client.sendall(sent)
    return client


def get(path: str, more: bytes = b"") -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), more)


def is_reset(client: socket.socket) -> bool:
    """Whether the server has dropped a connection. Reads nothing."""
    poll = select.poll()
    poll.register(client, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


UNREAD = {
    "pages": get("/small") * 300,
    "a large reply": get("/large"),
    "a large reply that ends the connection": get("/large", b"Connection: close\r\n"),
    "a stream": get("/stream"),
    "a page after a large reply": get("/large") + get("/small"),
}
"""Requests of clients that do not read, by name."""


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_a_client_that_does_not_read_is_dropped_in_time(name: str, half_closed: bool) -> None:
    with site(client_timeout=0.3) as where, connected(where, UNREAD[name]) as client:
        if half_closed:
            client.shutdown(socket.SHUT_WR)
        where.wait_until(lambda: is_reset(client))
        where.wait_until(lambda: not where.open and not where.runner.server_state.tasks)


def test_a_client_that_reads_a_byte_now_and_then_is_dropped_too() -> None:
    with site(client_timeout=0.5) as where, connected(where, get("/large")) as client:
        where.wait_until(lambda: client.recv(1) == b"" or is_reset(client))


def test_a_client_that_reads_slowly_gets_everything() -> None:
    with (
        site(client_timeout=1.0) as where,
        connected(where, get("/large", b"Connection: close\r\n")) as client,
    ):
        size, begin = 0, time.monotonic()
        while part := client.recv(PART):
            size += len(part)
            if time.monotonic() < begin + 1.2:  # at some times the least speed, for longer than the limit
                time.sleep(0.05)
    assert size > LARGE


def test_clients_that_do_not_read_shut_nobody_out() -> None:
    with site(max_connections=4) as where, ExitStack() as stack:
        for i in range(40):
            stack.enter_context(connected(where, [*UNREAD.values()][i % len(UNREAD)]))
            assert where.served()
            where.wait_until(lambda: len(where.open) <= 4)


def test_unread_replies_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD", 0.0)
    with site(max_unread=2 * LARGE) as where, ExitStack() as stack:
        for count in range(1, 7):
            stack.enter_context(connected(where, get("/large")))
            where.wait_until(lambda count=count: where.begun.count("/large") == count)
            where.wait_until(lambda count=count: len(where.open) == min(count, 2))
        where.wait_until(lambda: all(one.flow.write_paused for one in where.open))
        assert all(one.transport.get_write_buffer_size() <= PART + 1000 for one in where.open)
        assert where.served()


def test_clients_that_read_are_not_dropped_to_save_memory() -> None:
    with site(max_unread=LARGE) as where, ExitStack() as stack:
        clients = [stack.enter_context(connected(where, get("/large"))) for _ in range(4)]
        where.wait_until(lambda: where.begun.count("/large") == 4)
        assert not any(map(is_reset, clients))


def test_a_request_is_not_begun_while_the_last_reply_is_unread() -> None:
    with site() as where, connected(where, UNREAD["pages"]):
        where.wait_until(lambda: any(one.flow.write_paused for one in where.open))
        asyncio.run(asyncio.sleep(0.05))
        assert all(one.cycle.response_complete for one in where.open)


def test_a_connection_in_use_outlives_the_limit() -> None:
    with site(client_timeout=1.0) as where, httpx.Client() as client:
        for _ in range(8):
            assert client.get(f"http://127.0.0.1:{where.port}/small").status_code == 200
            (one,) = where.open
            bound = one.transport.get_extra_info("socket")
            assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # else each reply takes 40 ms
            port = one.client[1]
            time.sleep(0.2)
            assert [other.client[1] for other in where.open] == [port]


def test_a_connection_that_has_ended_is_freed_at_once() -> None:
    with site() as where:
        with connected(where, get("/small")) as client:
            where.wait_until(lambda: where.begun == ["/small"])
            gone = weakref.ref(where.open[0])
            assert client.recv(1)
            gc.disable()
        try:
            where.wait_until(lambda: gone() is None)
        finally:
            gc.enable()


def test_probes_of_a_half_closed_connection_end_with_it() -> None:
    with site() as where:
        with connected(where, get("/patient")) as client:
            client.shutdown(socket.SHUT_WR)
            where.wait_until(lambda: any(one._probing for one in where.open))
            (one,) = where.open
        where.wait_until(lambda: not where.open)
        where.wait_until(lambda: one._probing.cancelled())


def test_the_next_request_waits_until_a_reply_was_read() -> None:
    with site() as where, connected(where, get("/large") + get("/small", b"Connection: close\r\n")) as client:
        where.wait_until(lambda: any(one.flow.write_paused for one in where.open))
        asyncio.run(asyncio.sleep(0.05))
        assert where.begun == ["/large"]
        size = 0
        while part := client.recv(1 << 20):
            size += len(part)
        assert size > LARGE + 20_000
        assert where.begun == ["/large", "/small"]


@pytest.mark.parametrize("name", UNREAD)
def test_the_server_ends_while_clients_do_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LAST_WORDS", 0)
    with site(drain=0.0) as where, connected(where, UNREAD[name]) as client:
        where.wait_until(lambda: any(one.flow.write_paused for one in where.open))
        where.runner.should_exit = True
        where.wait_until(lambda: is_reset(client))
