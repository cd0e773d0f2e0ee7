"""Streams chat completions from a server that speaks OpenAI's protocol, and times each piece of text.

Every request has a connection of its own, and all requests share one event loop.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from soothsay.errors import SoothsayError

TIMEOUT = 600.0
"""Seconds without a byte after which a request fails."""

REFUSED = (400, 422)
"""Statuses with which servers refuse a field that they do not know."""

TEXTS = ("content", "reasoning_content", "reasoning")
"""Fields of a piece of text: the answer, and thoughts as some servers call them, or as others do."""

Json = dict[str, Any]


def now() -> float:
    """The time of the running event loop's clock."""
    return asyncio.get_running_loop().time()


class ChatError(SoothsayError):
    """A request failed.

    Args:
        message: what happened, for a reader.
        kind: the same in a word or two, for counting: "unreachable", "timeout", "broke off", "error in
            stream", or a status such as "429".
    """

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A streamed answer. Times are those of the event loop's clock, in seconds."""

    begin: float  # before the connection is made
    end: float
    pieces: list[float]  # when each piece of text came, thoughts included
    text: str  # without thoughts, as a client sends it back
    finish_reason: str
    usage: Any  # empty if the server sends none

    def told(self, *path: str) -> float | None:
        """Return a number of `usage`, such as "speculation", "drafted". None: the server does not tell it."""
        found = self.usage
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, int | float) and found >= 0 else None

    @property
    def counts(self) -> bool:
        """Whether the server says how many tokens the answer has."""
        return self.told("completion_tokens") is not None

    @property
    def tokens(self) -> int:
        """The server's count of tokens, or else the number of pieces."""
        told = self.told("completion_tokens")
        return len(self.pieces) if told is None else int(told)


class ChatClient:
    """Sends chats to one model on one server.

    Args:
        url: the server's address, up to where `/chat/completions` follows: "http://localhost:8000/v1".
        model: the server's name for the model.
        key: sent as the bearer token; empty: none.
        timeout: seconds without a byte after which a request fails.
        optional: fields of every request that are left out if the server refuses them.

    Raises `SoothsayError` if `url` is not an address. Coroutines raise `ChatError`.
    """

    def __init__(
        self, url: str, model: str, key: str = "", timeout: float = TIMEOUT, optional: Json | None = None
    ):
        self.url, self.model, self.timeout = _address(url), model, timeout
        self.place = self.url.netloc.rpartition("@")[2]
        """Host and port, without a user's name."""

        self.optional: Json = {"stream_options": {"include_usage": True}, **(optional or {})}
        """Optional fields that the server has not refused."""

        self.refused: tuple[str, ...] = ()
        """Names of the optional fields that the server has refused."""

        self._headers = {"Accept-Encoding": "identity", "Connection": "close"}  # compression delays pieces
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        secure = self.url.scheme == "https"  # made once: either kind takes longer than a request
        self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._settled = False  # whether it is known which optional fields the server refuses

    @property
    def name(self) -> str:
        """The model's name, if it is known, and the server's place."""
        return f"{self.model} at {self.place}" if self.model else self.place

    async def models(self) -> list[str]:
        """Return the server's names for its models."""
        try:
            async with self._response("GET", "models") as response:
                answered = await response.aread()
                if response.status_code != 200:
                    raise self._refusal(response, answered)
                return [str(model["id"]) for model in json.loads(answered)["data"] or ()]
        except (httpx.HTTPError, ValueError, TypeError, LookupError) as error:
            message = f"{self.url.geturl()} does not say which models it has ({error!r})"
            raise ChatError(message, "broke off") from None

    async def choose_model(self, name: str) -> None:
        """Check that the server has the model. A client without a model takes the server's only one.

        `name` stands for the server in messages.

        Raises `SoothsayError` if the server does not have the model, or has several and none was chosen.
        """
        try:
            known = await self.models()
        except ChatError as error:
            if error.kind == "unreachable" or not self.model:
                raise
            return  # the server does not list its models
        if not known:
            raise SoothsayError(f"{name} lists no models; load one there first")
        if not self.model and len(known) == 1:
            self.model = known[0]
        if self.model not in known:
            wanted = f"no model {self.model!r}" if self.model else "several models"
            raise SoothsayError(f"{name} has {wanted}; choose from {', '.join(known)}")

    async def ask(self, body: Mapping[str, Any]) -> TimedReply:
        """Stream the answer to a chat.

        A server may refuse optional fields. The first request finds out which: it is sent again without one
        field, then without two, and so on.

        `body` has the fields besides `model`, `stream` and the optional ones.
        """
        begin = now()
        reply = await self._ask({**body, **self.optional}, begin)
        if isinstance(reply, TimedReply):
            self._settled = True
            return reply
        options = () if self._settled else tuple(self.optional.items())
        for count in range(len(options) - 1, -1, -1):
            for kept in combinations(options, count):
                again = await self._ask({**body, **dict(kept)}, begin)
                if isinstance(again, TimedReply):
                    self.refused = tuple(name for name in self.optional if name not in dict(kept))
                    self.optional, self._settled = dict(kept), True
                    return again
        raise reply

    async def _ask(self, body: Json, begin: float) -> TimedReply | ChatError:
        """Send one request. A refusal is returned: a field may be the reason."""
        sent = {"model": self.model, "stream": True, **body}
        try:
            async with self._response("POST", "chat/completions", sent) as response:
                if response.status_code == 200:
                    return await self._stream(response, begin)
                refusal = self._refusal(response, await response.aread())
        except httpx.TimeoutException:
            raise ChatError(f"{self.name} was silent for {self.timeout:g} s", "timeout") from None
        except (httpx.HTTPError, ValueError, TypeError, AttributeError) as error:
            raise ChatError(f"{self.name} broke off ({error!r})", "broke off") from None
        if response.status_code in REFUSED:
            return refusal
        raise refusal

    async def _stream(self, response: httpx.Response, begin: float) -> TimedReply:
        """Read the events of an answer. Raises `ValueError` and the like if they are malformed."""
        pieces, texts = list[float](), list[str]()
        reason, usage = "", Json()
        async with aclosing(_events(response)) as events:
            async for event in events:
                came = now()
                if error := event.get("error"):
                    raise ChatError(f"{self.name} broke off: {error}", "error in stream")
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if any(map(delta.get, TEXTS)):
                        pieces.append(came)
                    texts.append(delta.get("content") or "")
                    reason = choice.get("finish_reason") or reason
                usage = event.get("usage") or usage
        return TimedReply(begin, now(), pieces, "".join(texts), reason, usage)

    @asynccontextmanager
    async def _response(
        self, method: str, name: str, body: Json | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request over a new connection; yield the answer before its body is read."""
        url = f"{self.url.scheme}://{self.place}{self.url.path.rstrip('/')}/{name}"
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        opened = httpx.AsyncClient(transport=transport, headers=self._headers, timeout=self.timeout)
        async with opened as client:
            try:
                request = client.build_request(method, url, json=body)
                response = await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                message = f"{self.url.geturl()} cannot be reached ({str(error) or 'no answer'})"
                raise ChatError(message, "unreachable") from None
            async with aclosing(response):
                yield response

    def _refusal(self, response: httpx.Response, answered: bytes) -> ChatError:
        shown = answered[:500].decode(errors="replace")
        message = f"{self.name} answered {response.status_code} {response.reason_phrase}: {shown}"
        return ChatError(message, str(response.status_code))


def _address(url: str) -> SplitResult:
    with suppress(ValueError, httpx.InvalidURL):
        parts, _ = urlsplit(url), httpx.URL(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:  # `port` may raise
            return parts
    raise SoothsayError(f"{url!r} is not the address of a server, such as http://localhost:8000/v1")


async def _events(response: httpx.Response) -> AsyncGenerator[Json, None]:
    """Yield the objects of server-sent events. Raises `ValueError` if the stream ends before `[DONE]`.

    Only line feeds end a line: JSON may hold other ends of lines as they are.
    """
    left = b""
    async with aclosing(response.aiter_bytes()) as parts:  # type: ignore[type-var]
        async for part in parts:
            *lines, left = (left + part).split(b"\n")
            for line in lines:
                field, _, value = line.partition(b":")
                if field == b"data" and value.strip() == b"[DONE]":
                    return
                if field == b"data" and value.strip():  # empty ones keep connections open
                    yield json.loads(value)
    raise ValueError("the stream ended before [DONE]")
