"""The checks that every HTTP request passes: host name, API key, rate, size and time; and its log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soothsay.server.access.accounts import Account, FailedKeys
from soothsay.server.access.api_keys import KeyFileError, KeyRing
from soothsay.server.http.api_errors import ApiError, internal_error, try_later
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.json_log import log
from soothsay.server.http.json_streams import DisconnectedError
from soothsay.server.server_config import ServerConfig

DISCONNECTED = 499
"""Status in log and metrics if the client disconnected before the response began."""

ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The form of a request id that a client may choose itself."""


class Gate:
    """Checks each HTTP request, and passes it on to the application.

    Sets `scope["state"]`: the request's `id`, the `account` of its key, and `record`. The application adds
    to `record` what the log line shall say.

    Args:
        app: the application.
        config: the limits.
        count: called with the path and the status of each response.
        keys: the valid API keys; None: no key is needed.
        routes: the application's routes. Metrics and the log call all other paths "other".
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        count: Callable[[str, int], None],
        keys: KeyRing | None,
        routes: Sequence[ApiRoute],
    ):
        self._app, self._config, self._count, self._keys = app, config, count, keys
        self._routes = {route.path: route for route in routes}
        self._failed_keys = FailedKeys(config.max_failed_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Passes on whatever is not HTTP."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        record: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, account=None, record=record)
        status: int | None = None

        async def send_named(message: Message) -> None:
            """Add the request's id, and remember the status."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": named}
            await send(message)

        begin = time.perf_counter()
        try:
            await self._serve(scope, headers, receive, send_named)
        except DisconnectedError:
            pass
        except Exception as error:
            if not isinstance(error, (ApiError, HTTPException, OSError)):
                log.error("request failed", exc_info=True, extra={"id": request_id})
            if status is None:
                await _as_api_error(error).response(scope["path"])(scope, receive, send_named)
            else:  # the response has begun, so it cannot become an error: close the connection
                record["broken"] = type(error).__name__
                if not isinstance(error, OSError):
                    raise
        finally:
            route = self._routes.get(scope["path"])
            path = "other" if route is None else scope["path"]
            self._count(path, status or DISCONNECTED)
            facts = {"id": request_id, "method": scope["method"], "path": path}
            facts |= {"status": status or DISCONNECTED, "seconds": round(time.perf_counter() - begin, 4)}
            # a probe that gets 503 is told the state of the engines, and not refused
            quiet = route is not None and status is not None and (status < 400 or status == 503)
            log.log(route.level if route and quiet else logging.INFO, "request", extra={**facts, **record})

    async def _serve(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Check the request's headers, and run the application. Raises `ApiError`."""
        without_length = b"content-length" not in headers and scope.get("http_version") != "1.0"
        if b"transfer-encoding" in headers and not without_length:
            # others may find another end of the body, and take what follows for a request of another client
            problem = "Transfer-Encoding is not allowed beside Content-Length or in HTTP/1.0"
            message = f"{problem}; send Content-Length"
            raise ApiError(400, message, "ambiguous_length", headers={"Connection": "close"})
        if self._config.hosts and _host(headers) not in self._config.hosts:
            problem = "the name in the request's Host header is not allowed here"
            raise ApiError(403, f"{problem}; --allowed-host allows more names", "host_not_allowed")
        if self._keys is not None:
            self._admit(scope, headers, self._keys)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._config.max_body:
            raise _too_large(self._config.max_body)
        scope["app"] = self._app  # the router then raises an error for a path that it does not have
        await self._app(scope, self._limited(receive), send)

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes], keys: KeyRing) -> None:
        """Find the account of a request's key, and charge it. Raises `ApiError`."""
        state, route = scope["state"], self._routes.get(scope["path"])
        keyless = route is not None and route.keyless
        try:
            account = self._account(scope, headers, keys)
        except ApiError:
            if keyless:  # there, a key only shows more
                return
            raise
        state["account"] = account
        state["record"]["key"] = account.key.name
        if keyless:
            return
        if route is not None and route.operator and not account.key.operator:
            raise ApiError(403, "this needs an operator's key (soothsay keys add --operator)", "not_allowed")
        if scope["method"] == "POST" or (route is not None and route.counted):
            account.charge_request(with_answers=route is None or route.answers)

    def _account(self, scope: Scope, headers: Mapping[bytes, bytes], keys: KeyRing) -> Account:
        """The account of a request's key. Raises `ApiError` if there is none.

        The key is in the header Authorization, or in X-Api-Key, where Anthropic's clients have it. An address
        with too many wrong keys may still use a right one: clients share addresses behind proxies,
        and nobody finds a key by trying.
        """
        kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        given = bearer if kind.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        try:
            account = keys.find(given.strip())
        except KeyFileError:
            raise try_later("the server cannot read its API keys", "keys_unreadable", seconds=5) from None
        if account is None:
            if given:
                self._failed_keys.count((scope.get("client") or ("",))[0])
            message = "give a valid API key: Authorization: Bearer KEY, or X-Api-Key: KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return account

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with limits of size and time. After the whole body, there is no limit of time.

        Each part must come within `client_timeout`, and the whole at `min_body_rate` after that time.
        """
        size, whole = 0, False
        clock = asyncio.get_running_loop().time
        patience, begin = self._config.client_timeout, clock()

        async def limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            due = begin + patience + size / self._config.min_body_rate
            try:
                async with asyncio.timeout_at(min(clock() + patience, due)):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request's body did not come in time", "timeout") from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._config.max_body:
                raise _too_large(self._config.max_body)
            return message

        return limited


def _host(headers: Mapping[bytes, bytes]) -> str:
    """The name in the Host header, without the port, in lower case."""
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    return re.sub(r":\d*$", "", host)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        taken = set((error.headers or {}).get("Allow", "").split(", ")) - {"", "HEAD"}
        message = f"{error.detail}: this path takes {', '.join(sorted(taken))}" if taken else error.detail
        return ApiError(error.status_code, message, "not_possible", headers=error.headers)
    return error if isinstance(error, ApiError) else internal_error()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", "request_too_large")
