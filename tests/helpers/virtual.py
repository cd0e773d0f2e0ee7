"""An event loop with a virtual clock that skips waits, and a server that answers after known delays."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

FIRST, BETWEEN = 0.25, 0.125
"""Seconds until the first piece, and between two pieces. Sums of them are exact in floating point."""


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        connected = len(self.get_map()) > 1  # besides the loop's own wake-up socket
        events = super().select(0.001 if connected and timeout != 0 else 0)  # real data comes first
        if not events and timeout:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but waits take no real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _Serving(VirtualLoop):
    """A loop in which servers run until it is closed."""

    def __init__(self, fakes: Sequence[Fake]):
        super().__init__()
        self._servers = [self.run_until_complete(fake.start()) for fake in fakes]

    def close(self) -> None:
        while self._servers:
            self._servers.pop().close()
        super().close()


class _Policy(asyncio.DefaultEventLoopPolicy):
    """A policy that returns an existing loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self._loop = loop

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


@contextmanager
def next_run(*fakes: Fake) -> Iterator[None]:
    """Run the next `asyncio.run`, in any code, on a virtual clock with these servers."""
    before, loop = asyncio.get_event_loop_policy(), _Serving(fakes)
    asyncio.set_event_loop_policy(_Policy(loop))
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
        loop.close()


@dataclass
class Fake:
    """A server with OpenAI's protocol. It answers one request at a time if `serial`, else all at once."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo", " there", "!"])
    first: float = FIRST
    between: float = BETWEEN
    usage: Any = None
    refuses: set[str] = field(default_factory=set)
    models: list[str] | None = field(default_factory=lambda: ["m"])
    framing: str = "chunked"
    serial: bool = False
    fail: Callable[[int], str | None] = lambda number: None
    """Maps a chat request's number to its failure, or None.

    A failure is a status, "hang up", "stop early", "silent", "nonsense", or the data of an event.
    """

    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def prompts(self) -> list[str]:
        """The last message of each request, without warm-ups."""
        asked = [body["messages"][-1]["content"] for body in self.bodies]
        return [text for text in asked if "a river, a bridge" not in text]

    async def start(self) -> asyncio.Server:
        self._turn = asyncio.Semaphore(1 if self.serial else 1000)
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            if head.startswith("GET /v1/models "):
                known = None if self.models is None else {"data": [{"id": name} for name in self.models]}
                self._whole(
                    writer, "200 OK" if known else "404 Not Found", known or {"error": "no such path"}
                )
            else:
                self.keys.append(fields.get("authorization", ""))
                await self._chat(json.loads(body), writer)
            await writer.drain()
        except (ConnectionError, EOFError):
            pass
        finally:
            writer.close()

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.arrivals.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self._turn:
                await self._answer(body, writer, self.fail(number))
        finally:
            self.running -= 1

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter, fail: str | None) -> None:
        if unknown := self.refuses & body.keys():
            self._whole(writer, "422 Unprocessable", {"error": f"unknown {sorted(unknown)}"})
            return
        if fail is not None and fail[0].isdigit():
            self._whole(writer, fail, {"error": "because"})
            return
        if fail == "hang up":
            return
        framing = "Transfer-Encoding: chunked\r\n" if self.framing == "chunked" else ""
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n".encode())
        self._part(
            writer, ': a comment\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        )
        for place, piece in enumerate(self.pieces):
            await asyncio.sleep(self.between if place else self.first)
            if place and fail == "silent":
                await asyncio.sleep(1e6)
            if place and fail in ("stop early", "nonsense"):
                self._part(writer, "\n" if fail == "stop early" else "data: {nonsense\n\n", last=True)
                return
            delta = {"delta": {"content": piece}, "finish_reason": None}
            event = json.dumps({"choices": [delta]})
            self._part(writer, f"data: {event[:9]}")  # splits an event in the middle of a line
            self._part(writer, f"{event[9:]}\r\n\r\n")
            await writer.drain()
        if fail is not None:
            self._part(writer, f"data: {fail}\n\n")
        self._part(writer, 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n')
        if self.usage is not None and "stream_options" in body:
            self._part(writer, f"data: {json.dumps({'choices': [], 'usage': self.usage})}\n\n")
        self._part(writer, "data: [DONE]\n\n", last=True)

    def _part(self, writer: asyncio.StreamWriter, text: str, *, last: bool = False) -> None:
        if self.framing != "chunked":
            writer.write(text.encode())
            return
        writer.write(f"{len(text.encode()):x}\r\n".encode() + text.encode() + b"\r\n")
        if last:
            writer.write(b"0\r\n\r\n")

    def _whole(self, writer: asyncio.StreamWriter, status: str, said: Any) -> None:
        data = json.dumps(said).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


@contextmanager
def in_thread(*fakes: Fake) -> Iterator[None]:
    """Run the servers in a thread with its own loop, in real time."""
    ready: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        servers = [await fake.start() for fake in fakes]
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ready.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        await stop.wait()
        for server in servers:
            server.close()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: asyncio.run(serve()))
        stop = ready.result(10)
        try:
            yield
        finally:
            stop()
            served.result(10)
