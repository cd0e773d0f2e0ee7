"""What every request of HTTP passes: an id, a key, limits of size and patience, a line in the log."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soothsay.server.config import ServerConfig
from soothsay.server.errors import ApiError, internal_error
from soothsay.server.keys import Account, KeyRing
from soothsay.server.metrics import Metrics

log = logging.getLogger("soothsay.server")

ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A client's own id of a request that is taken over."""


class Gate:
    """Stands before the application. `scope["state"]` gets `id`, `account`, and `record`, a mapping of what
    the log is to tell beside what is known here.

    Args:
        app: what it stands before.
        config: the limits.
        metrics: answers are counted there.
        keys: who may ask; None: everyone.
        paths: the application's own; all others are counted as one.
        keyless: those of them that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        metrics: Metrics,
        keys: KeyRing | None,
        paths: frozenset[str],
        keyless: frozenset[str],
    ):
        self._app, self._config, self._metrics, self._keys = app, config, metrics, keys
        self._paths, self._keyless = paths, keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or hand on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        record: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, account=None, record=record)
        reply = _Reply(send, request_id, self._config.client_timeout)
        begin = time.perf_counter()
        try:
            await self._serve(scope, headers, receive, reply)
        except Exception as error:
            if not isinstance(error, (ApiError, HTTPException, OSError)):
                log.error("request failed", exc_info=True, extra={"id": request_id})
            if reply.status is None:
                await _problem(error).response()(scope, receive, reply)
            else:  # begun, and cannot be ended well: the connection is closed
                record["broken"] = type(error).__name__
                if not isinstance(error, OSError):
                    raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answered(path, reply.status or 499)
            log.info(
                "request",
                extra={
                    "id": request_id,
                    "method": scope["method"],
                    "path": path,
                    "status": reply.status or 499,  # 499: the client had gone
                    "seconds": round(time.perf_counter() - begin, 4),
                    **record,
                },
            )

    async def _serve(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        if self._config.hosts and _host(headers) not in self._config.hosts:
            raise ApiError(
                403,
                "this server does not answer to the name in the request's Host header; whoever runs it can "
                "allow that with --allowed-host",
                "host_not_allowed",
            )
        if self._keys is not None and scope["path"] not in self._keyless:
            account = _authenticate(self._keys, headers.get(b"authorization", b"").decode("latin-1"))
            scope["state"]["account"] = account
            scope["state"]["record"]["key"] = account.key.name
            if scope["method"] == "POST":
                _admit(account)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._config.max_body:
            raise _too_large(self._config.max_body)
        scope["app"] = self._app  # so that the router raises what it has no route for
        await self._app(scope, self._patient(receive), send)

    def _patient(self, receive: Receive) -> Receive:
        """`receive` within the limits of size and patience. Once the body is there, silence is fine."""
        size, whole = 0, False

        async def limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(self._config.client_timeout):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request's body did not come in time", "timeout") from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._config.max_body:
                raise _too_large(self._config.max_body)
            return message

        return limited


class _Reply:
    """`send` that adds the request's id, remembers the status, and does not wait for ever for the client."""

    def __init__(self, send: Callable[[Message], Awaitable[None]], request_id: str, timeout: float):
        self._send, self._id, self._timeout = send, request_id.encode(), timeout
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id)]
            message = {**message, "headers": headers}
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(message)
        except TimeoutError:
            raise OSError("the client does not read") from None


def _host(headers: Mapping[bytes, bytes]) -> str:
    """The name in the Host header, without the port."""
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    return re.sub(r":\d*$", "", host)


def _problem(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, "not_possible", headers=error.headers)
    return error if isinstance(error, ApiError) else internal_error()


def _authenticate(keys: KeyRing, header: str) -> Account:
    kind, _, secret = header.partition(" ")
    account = keys.find(secret.strip()) if kind.lower() == "bearer" else None
    if account is None:
        raise ApiError(
            401,
            "give a valid API key: Authorization: Bearer KEY",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return account


def _admit(account: Account) -> None:
    seconds = account.wait()
    if seconds > 0:
        raise ApiError(
            429,
            "this key has used up its share of the minute; try again later",
            "rate_limit_exceeded",
            headers={"Retry-After": str(math.ceil(seconds))},
        )
    account.requests.charge(1)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", "request_too_large")
