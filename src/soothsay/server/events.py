"""Server-sent events, and a way to stop work when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from soothsay.server.api_errors import ApiError

T = TypeVar("T")


class DisconnectedError(Exception):
    """The client has disconnected."""


class EventStream(Response):
    """A response of server-sent events, one for each chunk.

    Args:
        chunks: JSON bodies of the events. An `ApiError` that they raise becomes the last event.
        settle: called once, at the end or when the client disconnects.
    """

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], settle: Callable[[], None]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._chunks, self._settle = chunks, settle

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
        try:
            async for chunk in self._chunks:
                await _send_event(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
        except ApiError as error:
            await _send_event(send, json.dumps(error.body))
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


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


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
