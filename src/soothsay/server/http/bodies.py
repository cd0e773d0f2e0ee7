"""Types of the fields of bodies, and how bodies are read and worked on away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from soothsay.server.http.api_errors import ApiError, try_later
from soothsay.server.http.json_streams import DisconnectedError
from soothsay.server.http.safe_json import JsonError, read_json

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

MAX_FIELDS = 2048
"""Limit of fields of one object. Each wrong one makes an error, of which the client gets the first."""


def _limited(data: Any) -> Any:
    """Refuse an object with too many fields before its fields are checked."""
    if isinstance(data, Mapping) and len(data) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"an object must not have more than {MAX_FIELDS} fields")
    return data


Json = dict[str, Any]
"""A JSON object."""

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list. Its first wrong item ends validation: thousands of errors would take gigabytes."""

Fields = Annotated[dict[str, T], BeforeValidator(_limited)]
"""An object whose fields may have any name."""

# Errors leave out the names of branches that end with a bracket.
TextOr = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[T, Tag("[more]")],
    Discriminator(lambda value: "[text]" if isinstance(value, str) else "[more]"),
]
"""A text, or something else."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: Any) -> Any:
    return [*map(_whole, value)] if isinstance(value, list) else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which may be written as 12 or as 12.0: JSON has one type of number (RFC 8259)."""

TokenIds = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_all_whole)]
"""A list of whole numbers."""


class Body(BaseModel):
    """A body, or a part of one. Null means the default, in every field that has one.

    Unknown fields are dropped: clients send back what they got.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(_limited(data), Mapping):
            return data
        return {name: value for name, value in data.items() if value is not None}


def by_type(*kinds: str, missing: str = "", other: str = "other") -> Discriminator:
    """Tells objects apart by their field `type`: the branch of "text" is `[text]`.

    Args:
        kinds: types that have branches.
        missing: the type of an object that does not say.
        other: the type whose branch objects of other types have.
    """

    def branch(value: Any) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else None
        kind = kind or missing
        return f"[{kind if kind in kinds else other}]"

    return Discriminator(branch)


SMALL = 1 << 15
"""Limit of bytes in a small body. Small bodies do not wait for large ones.

Large bodies are worked on one at a time. Each takes up to 200 MB for a moment, and 300 MB while 3 MB of text
are tokenized. Parsing holds the interpreter's lock, so two at once are no faster, and the event loop would
wait for both.
"""


FROM_PAGES = ("origin", "referer", "sec-fetch-site")
"""Headers that browsers send, and other clients do not."""


class BodyReader:
    """Reads the bodies of requests.

    Args:
        max_held: limit of bytes that all bodies take together until the work on them is done. Small bodies
            pass nevertheless, so that clients with huge ones lock nobody else out.
    """

    def __init__(self, max_held: int):
        self._max_held, self._held = max_held, 0
        self._thread = ThreadPoolExecutor(1, "body")

    async def read(self, http: Request, kind: type[B], work: Callable[[B], T]) -> T:
        """Read and check the body of a request, and work on it. Raises `ApiError`, or `DisconnectedError`.

        Args:
            http: the request.
            kind: the class of the body.
            work: all that takes a time that grows with the body. It runs in the thread that parses the body,
                and nothing but its result is kept.
        """
        if not _is_safe(http.headers):
            raise ApiError(415, "send JSON, with Content-Type: application/json", "unsupported_media_type")
        if (encoding := http.headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"send the body as it is: Content-Encoding: {encoding[:32]} is not supported"
            raise ApiError(415, message, "unsupported_media_type")
        parts: list[bytes] = []
        size = 0
        try:
            async for part in http.stream():
                parts.append(part)
                size += len(part)
                self._held += len(part)
                if self._held > self._max_held and size > SMALL:
                    raise try_later("the server is reading too many large bodies; try again later")
            content = b"".join(parts)
            parts.clear()
            loop, thread = asyncio.get_running_loop(), None if size <= SMALL else self._thread
            return await loop.run_in_executor(thread, lambda: work(parse(content, kind)))
        except ClientDisconnect:
            raise DisconnectedError from None
        finally:
            self._held -= size


def _is_safe(headers: Mapping[str, str]) -> bool:
    """Whether no page of another site can have sent a request, so that none can use a visitor's access.

    A browser asks the server for permission before a page of another site may send JSON. Requests of another
    type are taken from clients that are no browser: browsers tell the origin of what scripts send. Old ones
    do not tell that of forms, and these can have JSON as plain text.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return True
    return kind != "text/plain" and not any(name in headers for name in FROM_PAGES)


def parse(content: bytes, kind: type[B]) -> B:
    """The object that a body describes. Raises `ApiError`, which names the first field that is wrong."""
    try:
        value = read_json(content)
    except JsonError as error:
        code = "invalid_value" if error.valid else "invalid_json"
        message = f"{error.field}: {error}" if error.field else str(error)
        raise ApiError(400, message, code, param=error.field or None) from None
    return make_body(kind, value)


def make_body(kind: type[B], fields: Any) -> B:
    """A body of some fields, checked as if a client had sent it. Raises `ApiError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ApiError.from_validation(error) from None
