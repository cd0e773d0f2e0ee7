"""Parts of bodies that have several forms: which one is read, and errors that name what is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, Discriminator
from pydantic_core import PydanticCustomError

from soothsay.server.api_errors import ApiError
from soothsay.server.protocol import Body

# Errors leave out the names of branches that end with a bracket.
TEXT_OR_MORE = Discriminator(lambda value: "[text]" if isinstance(value, str) else "[more]")
"""Tells a text, the branch `[text]`, from everything else, `[more]`."""


class LenientBody(Body):
    """A part of a body. Fields that the server does not read are ignored: clients send back what they got."""


def by_type(otherwise: str = "") -> Discriminator:
    """Tells objects apart by their field `type`: the branch of "text" is `[text]`.

    Args:
        otherwise: the type if the object does not say.
    """

    def branch(value: Any) -> str:
        return f"[{value.get('type') or otherwise if isinstance(value, Mapping) else otherwise}]"

    return Discriminator(branch)


def only(noun: str, *kinds: str, hints: Mapping[str, str], otherwise: str | None = None) -> BeforeValidator:
    """Checks the field `type` of an object, so that an error names what is not supported.

    Args:
        noun: what the objects are, in the error.
        kinds: the supported types.
        hints: unsupported types, and what to do instead.
        otherwise: the type if the object does not say.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kind = value.get("type") or otherwise
        if kind in kinds:
            return value
        name = str(kind)[:64]
        hint = hints.get(name, f"supported are: {', '.join(kinds)}")
        facts = {"noun": noun, "name": name, "hint": hint}
        raise PydanticCustomError("unsupported", "{noun} of type {name} are not supported: {hint}", facts)

    return BeforeValidator(check)


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    """Raise `ApiError` for fields that this server, or one of its APIs, does not have.

    Args:
        extra: the fields of a body that its class does not list.
        refused: fields that cannot be served, unless they are empty, and what to do instead.
        renamed: fields of chats that the API has under another name; empty: not at all.
    """
    for name, value in (extra or {}).items():
        if name in refused and value not in (None, False, "", [], {}):
            raise ApiError(400, f"{name}: {refused[name]}", "unsupported", param=name)
        if name in renamed:
            hint = f"; use {renamed[name]}" if renamed[name] else ""
            message = f"{name} is not a parameter of this path{hint}"
            raise ApiError(400, message, "unknown_parameter", param=name)
