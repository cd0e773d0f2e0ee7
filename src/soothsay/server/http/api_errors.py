"""Errors that clients get, in OpenAI's format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

from soothsay.core.params import SamplingParams
from soothsay.errors import RequestError, our_words

KINDS = {
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
}
"""OpenAI's code for a kind of error of pydantic. All other kinds are "invalid_value"."""


ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by HTTP status. Others are "invalid_request_error", from 500 on "api_error"."""

WANTED = "it must be "
OBJECT = f"{WANTED}an object"

SCALARS = frozenset({"bool", "float", "int", "str"})
"""Names of alternatives in pydantic's places of errors. Names of classes begin with a capital letter."""

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
        otherwise = "invalid_request_error" if self.status < 500 else "server_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, otherwise)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": ...}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body in the form of Anthropic's API."""
        otherwise = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_KINDS.get(self.status, otherwise)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error with another API's name of the field."""
        before = self.param or ""
        first, dot, rest = before.partition(".")
        param = f"{names.get(first) or first}{dot}{rest}" or None
        message = self.message
        if before and param and message.startswith(before):
            message = param + message.removeprefix(before)
        return ApiError(self.status, message, self.code, param=param, headers=self.headers)

    def response(self, path: str) -> JSONResponse:
        """The HTTP response to a request for `path`, in the form of the API that the path belongs to."""
        body = self.body
        if path.startswith("/api/"):
            body = {"error": self.message}
        elif path.startswith("/v1/messages"):
            body = self.anthropic_body
        return JSONResponse(body, self.status, self.headers)

    @classmethod
    def from_request(cls, error: RequestError) -> ApiError:
        """A request that the engine refuses. Its message begins with the field if one is wrong."""
        message = str(error)
        named = re.match(rf"(?:{'|'.join(SamplingParams.__dataclass_fields__)})\b|\w+(?==)", message)
        if "the context of" in message:
            return cls(400, message, "context_length_exceeded")
        return cls(400, message, "invalid_value", param=named[0] if named else None)

    @classmethod
    def from_validation(cls, error: ValidationError) -> ApiError:
        """A body that is not valid. Reports its first error."""
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        field, kind, message = _first(errors)
        code = KINDS.get(kind, "invalid_value")
        if field:
            message = f"{field}: {message}"
        elif kind == "model_type":
            message = "give a JSON object: {...}"
        return cls(400, message, code, param=field or None)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors that are raised inside another API's names of fields. Unknown ones keep their names."""
    try:
        yield
    except ApiError as error:
        raise (error if error.code == "unknown_parameter" else error.renamed(names)) from None


def _first(errors: Sequence[ErrorDetails]) -> tuple[str, str, str]:
    """The field, the kind and the message of the first error.

    A field that may have several forms has an error for each. Those that got furthest into the value count.
    If they are about the same place, the message names all of their forms.
    """
    first = _field(errors[0])
    own = [one for one in errors if _field(one) == first or _field(one).startswith(f"{first}.")]
    field = max(map(_field, own), key=lambda name: name.count("."))
    same = [one for one in own if _field(one) == field]
    told, *more = dict.fromkeys(map(in_words, same))
    if all(message.startswith(WANTED) for message in (told, *more)):
        told = " or ".join([told, *(message.removeprefix(WANTED) for message in more)])
    return field, same[0]["type"], told


def in_words(error: ErrorDetails) -> str:
    """What is wrong with a value."""
    return our_words(OBJECT if error["type"] == "model_type" else error["msg"])


def _field(error: ErrorDetails) -> str:
    """The place of an error in the body, without the names of alternatives and their classes."""
    *parts, last = map(str, error["loc"]) if error["loc"] else ("",)
    told = [part for part in parts if not _is_alternative(part)]
    if not _is_alternative(last):
        told.append(last)
    return ".".join(told)


def _is_alternative(part: str) -> bool:
    return part.endswith("]") or part in SCALARS or part[:1].isupper()


def _shown(text: str) -> str:
    """A text that may come from a client, of limited length."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 4]} ..."


def unknown(name: str, known: Iterable[str], place: str = "") -> ApiError:
    """A field that this server does not know. `known`: the fields of the object, which is at `place`."""
    meant = get_close_matches(name, [*known], n=1)
    hint = f"did you mean {place}{meant[0]}?" if meant else "leave it out"
    message = f"{place}{name} is not a parameter that this server knows; {hint}"
    return ApiError(400, message, "unknown_parameter", param=place + name)


def invalid(param: str | None, message: str) -> ApiError:
    """A field that has a wrong value."""
    return ApiError(400, message, "invalid_value", param=param)


def unsupported(param: str | None, message: str) -> ApiError:
    """A field that asks for what this server, or its model, cannot do."""
    return ApiError(400, message, "unsupported", param=param)


def try_later(message: str, code: str = "overloaded", *, status: int = 503, seconds: float = 1) -> ApiError:
    """A failure that ends by itself. `seconds`: when to try again."""
    return ApiError(status, message, code, headers={"Retry-After": str(math.ceil(seconds))})


def internal_error() -> ApiError:
    """A failure of the server. The log has the details, under the request's id."""
    return ApiError(500, "the server failed at this request; see its log", "internal_error")
