"""Streams of JSON, and a way to stop work when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from soothsay.server.api_errors import ApiError

T = TypeVar("T")


LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that JSON text may contain, and that some clients take for the end of a line."""

SILENCE = 5.0
"""Seconds after which a stream without chunks sends text that clients skip. It keeps proxies from closing the
connection, and it shows whether the client is still there."""


class DisconnectedError(Exception):
    """The client has disconnected."""


def to_line(value: Any) -> str:
    """A value as JSON text without a line end of any kind."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)


@dataclass(frozen=True, slots=True)
class Framing:
    """How the chunks of a stream are written."""

    media_type: str
    frame: Callable[[dict[str, Any]], str]
    """The text of a chunk."""

    pause: str
    """Text between two chunks that clients skip."""

    end: str = ""
    """The text after the last chunk."""


EVENTS = Framing(
    "text/event-stream", lambda chunk: f"data: {to_line(chunk)}\n\n", ":\n\n", "data: [DONE]\n\n"
)
"""Server-sent events, ended as OpenAI's chats and completions are."""

NAMED_EVENTS = Framing(
    "text/event-stream", lambda chunk: f"event: {chunk['type']}\ndata: {to_line(chunk)}\n\n", ":\n\n"
)
"""Server-sent events that name their type."""

LINES = Framing("application/x-ndjson", lambda chunk: f"{to_line(chunk)}\n", " ")
"""One JSON value a line. Spaces may stand before it."""


class EventStream(Response):
    """A response that sends chunks as they come.

    Args:
        chunks: JSON bodies.
        settle: called once, at the end or when the client disconnects.
        framing: how to write the chunks.
        failure: makes the last chunk of an `ApiError` that `chunks` raise.
    """

    def __init__(
        self,
        chunks: AsyncIterator[dict[str, Any]],
        settle: Callable[[], None],
        framing: Framing,
        failure: Callable[[ApiError], dict[str, Any]],
    ):
        super().__init__(media_type=framing.media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._chunks, self._settle = chunks, settle
        self._framing, self._failure = framing, failure
        self._silent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await while_connected(receive, self._send(send))
        except DisconnectedError:
            scope["state"]["record"]["gone"] = True
        finally:
            self._settle()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        framing = self._framing
        pauses = asyncio.create_task(self._fill_pauses(send))
        try:
            async for chunk in self._chunks:
                self._silent = False
                await _send_text(send, framing.frame(chunk))
        except ApiError as error:
            await _send_text(send, framing.frame(self._failure(error)))
        finally:
            pauses.cancel()
            await asyncio.gather(pauses, return_exceptions=True)
        await _send_text(send, framing.end)
        await send({"type": "http.response.body", "body": b""})

    async def _fill_pauses(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(SILENCE)
            if self._silent:
                await _send_text(send, self._framing.pause)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. Cancels it and raises `DisconnectedError` on disconnection."""
    tasks = asyncio.create_task(work), asyncio.create_task(_disconnection(receive))
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


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
