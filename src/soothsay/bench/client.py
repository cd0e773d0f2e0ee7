"""A client of OpenAI's protocol that tells when each piece of an answer came. Every request has a connection
of its own, and all of them one event loop; nothing but the standard library is needed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

from soothsay.errors import SoothsayError

TIMEOUT = 600.0
"""Seconds of silence after which a server is given up."""

REFUSED = (400, 422)
"""What servers answer that do not know an option."""

Json = dict[str, Any]


class ClientError(SoothsayError):
    """A request has failed.

    Args:
        message: what has happened, for a reader.
        kind: the same in a word or two, for counting: "unreachable", "timeout", "broke off", or a status such
            as "429".
    """

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Reply:
    """A streamed answer. Times are those of the event loop's clock, in seconds."""

    begin: float  # before the request was sent, and before its connection unless there was one
    end: float
    pieces: list[float]  # when each piece of text came
    text: str
    finish_reason: str
    usage: Mapping[str, Any]  # empty: the server does not tell

    @property
    def counts(self) -> bool:
        """Whether the server says how many tokens there are."""
        return isinstance(self.usage.get("completion_tokens"), int)

    @property
    def tokens(self) -> int:
        """As the server counts them, or else the pieces."""
        return int(self.usage["completion_tokens"]) if self.counts else len(self.pieces)


class Connection:
    """For one request of HTTP/1.1; use `Client.connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Send it and read until the body of the answer."""
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"Content-Length: {len(body)}", "Connection: close"]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *fields = head.rstrip().split("\r\n")
        _, status, reason = (*first.split(" ", 2), "")[:3]
        pairs = (field.partition(":") for field in fields)
        answered = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Response(int(status), reason, answered, self._reader)

    def close(self) -> None:
        """At any time, and as often as one likes."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answers; the body comes when it is read."""

    status: int
    reason: str
    headers: Mapping[str, str]  # names in lower case
    reader: asyncio.StreamReader

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self._parts()])

    async def events(self) -> AsyncGenerator[Json, None]:
        """The objects of server-sent events. Raises `ValueError` if they end before `[DONE]`."""
        left = b""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                *lines, left = (left + part).split(b"\n")
                for line in lines:
                    field, _, value = line.partition(b":")
                    if field == b"data" and value.strip() == b"[DONE]":
                        return
                    if field == b"data":
                        yield json.loads(value)
        raise ValueError("the stream ended before [DONE]")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """As they come: the body is in chunks, has a length, or ends with the connection."""
        reader, length = self.reader, self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif length is not None:
            yield await reader.readexactly(int(length))
        else:
            while part := await reader.read(1 << 16):
                yield part


class Client:
    """Asks a model on a server.

    Args:
        url: up to where `/chat/completions` follows, such as "http://localhost:8000/v1".
        model: as the server calls it.
        key: sent as the bearer's token; empty: none.
        timeout: seconds of silence after which the server is given up.
        optional: fields of every request that are left out if the server refuses them.

    Raises `SoothsayError` if `url` is none. What is awaited raises `ClientError`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "",
        timeout: float = TIMEOUT,
        optional: Mapping[str, Any] | None = None,
    ):
        self.url, self.model, self.timeout = urlsplit(url), model, timeout
        if self.url.scheme not in ("http", "https") or not self.url.hostname:
            raise SoothsayError(f"{url!r} is no address of a server, such as http://localhost:8000/v1")
        self.place = self.url.netloc.rpartition("@")[2]
        """Host and port, without whatever was before them."""

        self.optional: Json = {"stream_options": {"include_usage": True}, **(optional or {})}
        """Fields that the server has not refused."""

        self.refused: tuple[str, ...] = ()
        """Names of those that it has."""

        self._headers = {
            "Host": self.place,
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
        }
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._settled = False  # whether it is known what the server refuses

    @property
    def name(self) -> str:
        """The model and where it is."""
        return f"{self.model} at {self.place}"

    async def connect(self) -> Connection:
        """A connection that is there before the clock starts."""
        url = self.url
        try:
            async with asyncio.timeout(self.timeout):
                return Connection(
                    *await asyncio.open_connection(
                        url.hostname,
                        url.port or (443 if url.scheme == "https" else 80),
                        ssl=url.scheme == "https" or None,
                    )
                )
        except OSError as error:
            raise ClientError(f"{url.geturl()} cannot be reached ({error})", "unreachable") from None

    async def models(self) -> list[str]:
        """What the server calls its models."""
        connection = await self.connect()
        try:
            async with asyncio.timeout(self.timeout):
                response = await connection.request("GET", self._path("models"), self._headers, b"")
                said = await response.read()
            if response.status != 200:
                raise self._refusal(response, said)
            return [str(model["id"]) for model in json.loads(said)["data"]]
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, TypeError, LookupError) as error:
            message = f"{self.url.geturl()} does not say which models it has ({error!r})"
            raise ClientError(message, "broke off") from None
        finally:
            connection.close()

    async def ask(self, body: Mapping[str, Any], connection: Connection | None = None) -> Reply:
        """The answer to a chat, streamed.

        Args:
            body: of the request, beside `model`, `stream` and the optional fields.
            connection: that is there already, and is used up.
        """
        begin = asyncio.get_running_loop().time()
        reply = await self._ask({**body, **self.optional}, connection, begin)
        if isinstance(reply, Reply):
            self._settled = True
            return reply
        options = () if self._settled else tuple(self.optional.items())
        for count in range(len(options) - 1, -1, -1):
            for kept in combinations(options, count):
                again = await self._ask({**body, **dict(kept)}, None, begin)
                if isinstance(again, Reply):
                    self.refused = tuple(name for name in self.optional if name not in dict(kept))
                    self.optional, self._settled = dict(kept), True
                    return again
        raise reply

    async def _ask(self, body: Json, connection: Connection | None, begin: float) -> Reply | ClientError:
        """The error is returned if the request may be all right without an option, else raised."""
        connection = connection or await self.connect()
        loop = asyncio.get_running_loop()
        sent = json.dumps({"model": self.model, "stream": True, **body}).encode()
        pieces, texts = list[float](), list[str]()
        reason, usage = "", Json()
        try:
            async with asyncio.timeout(self.timeout) as patience:
                path = self._path("chat/completions")
                response = await connection.request("POST", path, self._headers, sent)
                if response.status != 200:
                    refusal = self._refusal(response, await response.read())
                    if response.status in REFUSED:
                        return refusal
                    raise refusal
                async with aclosing(response.events()) as events:
                    async for event in events:
                        now = loop.time()
                        patience.reschedule(now + self.timeout)
                        if "error" in event:
                            raise ClientError(f"{self.name} broke off: {event['error']}", "error in stream")
                        for choice in event.get("choices") or ():
                            delta = choice.get("delta") or {}
                            if said := delta.get("content") or delta.get("reasoning_content"):
                                pieces.append(now)
                                texts.append(said)
                            reason = choice.get("finish_reason") or reason
                        usage = event.get("usage") or usage
                return Reply(begin, loop.time(), pieces, "".join(texts), reason, usage)
        except TimeoutError:
            raise ClientError(f"{self.name} was silent for {self.timeout:g} s", "timeout") from None
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, TypeError, AttributeError) as error:
            raise ClientError(f"{self.name} broke off ({error!r})", "broke off") from None
        finally:
            connection.close()

    def _path(self, name: str) -> str:
        return f"{self.url.path.rstrip('/')}/{name}"

    def _refusal(self, response: Response, said: bytes) -> ClientError:
        shown = said[:500].decode(errors="replace")
        message = f"{self.name} answered {response.status} {response.reason}: {shown}"
        return ClientError(message, str(response.status))
