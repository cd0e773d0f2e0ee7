"""Replies and streams of JSON, and a way to stop work when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from soothsay.server.http.api_errors import ApiError

T = TypeVar("T")


LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that JSON text may contain, and that some clients take for the end of a line."""

SILENCE = 5.0
"""Seconds after which a stream without chunks sends text that clients skip. It keeps proxies from closing the
connection, and it shows whether the client is still there."""


PART = 1 << 15
"""Characters that are written at a time. Their JSON takes a millisecond or two."""


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class DisconnectedError(Exception):
    """The client has disconnected."""


def to_line(value: Any) -> str:
    """A value as JSON text without a line end of any kind."""
    return _on_one_line(_encode(value))


def _on_one_line(text: str) -> str:
    for end, escape in LINE_ENDS.items():
        text = text.replace(end, escape)
    return text


def json_parts(value: Any, before: str = "", after: str = "") -> Iterator[str]:
    """A value as JSON text without a line end, in parts. All but the last have `PART` characters or more.

    Args:
        value: may have iterators where JSON has lists. Their items are made when they are written, so that a
            long list is never in memory. They are used up.
        before, after: text around the value.
    """
    held, size = [before], len(before)
    for piece in _pieces(value):
        held.append(piece)
        size += len(piece)
        if size >= PART:
            yield _on_one_line("".join(held))
            held, size = [], 0
    yield _on_one_line("".join([*held, after]))


def _pieces(value: Any) -> Iterator[str]:
    """The text of a value, in pieces: an item of an iterator, or a value without iterators, is one piece."""
    if isinstance(value, dict) and value:
        for place, (name, item) in enumerate(value.items()):
            yield f"{',' if place else '{'}{_encode(name)}:"
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for place, item in enumerate(value):
            yield "," if place else "["
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, Iterator):
        yield "["
        for place, item in enumerate(value):
            yield f",{_encode(item)}" if place else _encode(item)
        yield "]"
    else:
        yield _encode(value)


@dataclass(frozen=True, slots=True)
class Framing:
    """How the chunks of a stream are written."""

    media_type: str
    before: Callable[[dict[str, Any]], str]
    """The text before a chunk."""

    after: str
    """The text after a chunk."""

    pause: str
    """Text between two chunks that clients skip."""

    end: str = ""
    """The text after the last chunk."""

    def frame(self, chunk: dict[str, Any]) -> Iterator[str]:
        """The text of a chunk, in the parts of `json_parts`."""
        return json_parts(chunk, self.before(chunk), self.after)


EVENTS = Framing("text/event-stream", lambda _: "data: ", "\n\n", ":\n\n", "data: [DONE]\n\n")
"""Server-sent events, ended as OpenAI's chats and completions are."""

NAMED_EVENTS = Framing("text/event-stream", lambda chunk: f"event: {chunk['type']}\ndata: ", "\n\n", ":\n\n")
"""Server-sent events that name their type."""

LINES = Framing("application/x-ndjson", lambda _: "", "\n", " ")
"""One JSON value a line. Spaces may stand before it."""


class _Reply(Response):
    """A response without a known length, which ends when the client disconnects."""

    def __init__(self, media_type: str, headers: Mapping[str, str] | None = None):
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await while_connected(receive, self._send(send))
        except DisconnectedError:
            scope["state"]["record"]["gone"] = True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send_body(send)
        await send({"type": "http.response.body", "body": b""})

    @abstractmethod
    async def _send_body(self, send: Send) -> None:
        """Send the body."""


class JsonReply(_Reply):
    """A response with one JSON value, which may have iterators where JSON has lists, see `json_parts`."""

    def __init__(self, value: Any, headers: Mapping[str, str] | None = None):
        super().__init__("application/json", headers)
        self._parts = json_parts(value)
        self._first = next(self._parts)
        if len(self._first) < PART:  # a short one tells its length
            self.headers["content-length"] = str(len(self._first.encode()))

    async def _send_body(self, send: Send) -> None:
        await _send_parts(send, self._first, self._parts)


class EventStream(_Reply):
    """A response that sends chunks as they come.

    Args:
        chunks: JSON bodies.
        settle: called once, at the end or when the client disconnects.
        framing: how to write the chunks.
        failure: makes the last chunk of an `ApiError` that `chunks` raise.
        headers: of the response.
    """

    def __init__(
        self,
        chunks: AsyncIterator[dict[str, Any]],
        settle: Callable[[], None],
        framing: Framing,
        failure: Callable[[ApiError], dict[str, Any]],
        headers: Mapping[str, str] | None = None,
    ):
        # the second: nginx would gather chunks until they fill a page of memory
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(framing.media_type, {**own, **(headers or {})})
        self._chunks, self._settle = chunks, settle
        self._framing, self._failure = framing, failure
        self._silent = False
        self._writing = asyncio.Lock()  # held from a chunk's first part to its last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._settle()

    async def _send_body(self, send: Send) -> None:
        pauses = asyncio.create_task(self._fill_pauses(send))
        try:
            async for chunk in self._chunks:
                self._silent = False
                await self._write(send, chunk)
        except ApiError as error:
            await self._write(send, self._failure(error))
        finally:
            pauses.cancel()
            await asyncio.gather(pauses, return_exceptions=True)
        await _send_text(send, self._framing.end)

    async def _write(self, send: Send, chunk: dict[str, Any]) -> None:
        parts = self._framing.frame(chunk)
        async with self._writing:
            await _send_parts(send, next(parts), parts)

    async def _fill_pauses(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(SILENCE)
            if self._silent and not self._writing.locked():
                await _send_text(send, self._framing.pause)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. Cancels it and raises `DisconnectedError` on disconnection."""

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnection())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise DisconnectedError
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_text(send: Send, text: str) -> None:
    if text:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _send_parts(send: Send, part: str, parts: Iterator[str]) -> None:
    """Send a text in the parts of `json_parts`. Those after the first are made in a thread."""
    await _send_text(send, part)
    while len(part) >= PART:
        part = await asyncio.to_thread(next, parts, "")
        await _send_text(send, part)
