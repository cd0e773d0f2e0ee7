"""Errors that clients get, in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from soothsay.errors import RequestError

KINDS = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
}
"""OpenAI's code for a kind of error of pydantic. All other kinds are "invalid_value"."""


MAX_SHOWN = 1000
"""Limit of characters in a message, and in the name of a field. Both may quote what the client has sent."""


class ApiError(Exception):
    """An error that the client gets instead of an answer.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do. Without paths or traces, since the client reads it.
        code: OpenAI's code, for programs.
        param: the field of the request that is wrong.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, _shown(message), code
        self.param = None if param is None else _shown(param)
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ApiError, param=self.param, headers=self.headers)
        return make, (self.status, self.message, self.code)

    @property
    def kind(self) -> str:
        """OpenAI's type of error, which follows from the status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": ...}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def renamed(self, names: Mapping[str, str | None]) -> ApiError:
        """The same error with another API's name of the field."""
        before = self.param or ""
        first, dot, rest = before.partition(".")
        param = f"{names.get(first) or first}{dot}{rest}" or None
        message = self.message
        if before and param and message.startswith(before):
            message = param + message.removeprefix(before)
        return ApiError(self.status, message, self.code, param=param, headers=self.headers)

    def response(self, path: str) -> JSONResponse:
        """The HTTP response to a request for `path`. Below `/api/` it has the form of Ollama's API."""
        body = {"error": self.message} if path.startswith("/api/") else self.body
        return JSONResponse(body, self.status, self.headers)

    @classmethod
    def from_request(cls, error: RequestError) -> ApiError:
        """A request that the engine refuses. Its message begins with `field=` if one field is wrong."""
        message = str(error)
        named = re.match(r"(\w+)=", message)
        if "the context of" in message:
            return cls(400, message, "context_length_exceeded")
        return cls(400, message, "invalid_value", param=named[1] if named else None)

    @classmethod
    def from_validation(cls, error: ValidationError) -> ApiError:
        """A body that is not valid. Reports its first error."""
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"] if not str(part).endswith("]"))
        code = KINDS.get(first["type"], "invalid_value")
        if code == "unknown_parameter":
            message = f"{field} is not a parameter that this server knows; leave it out"
        else:
            message = f"{field}: {first['msg']}" if field else first["msg"]
        return cls(400, message, code, param=field or None)


def _shown(text: str) -> str:
    """A text that may come from a client, of limited length."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 4]} ..."


def internal_error() -> ApiError:
    """A failure of the server. The log has the details, under the request's id."""
    return ApiError(500, "the server failed at this request; see its log", "internal_error")
