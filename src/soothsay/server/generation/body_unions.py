"""Parts of bodies that have several forms: which one is read, and errors that name fields of other APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Discriminator

from soothsay.server.generation.request_bodies import Body
from soothsay.server.http.api_errors import ApiError, unsupported

# Errors leave out the names of branches that end with a bracket.
TEXT_OR_MORE = Discriminator(lambda value: "[text]" if isinstance(value, str) else "[more]")
"""Tells a text, the branch `[text]`, from everything else, `[more]`."""


class LenientBody(Body):
    """A part of a body. Fields that the server does not read are ignored: clients send back what they got."""


class OtherKind(LenientBody):
    """A tool, or a choice of one, that is not a function. Chats leave it out."""

    model_config = ConfigDict(extra="allow")

    type: str

    def chat(self) -> dict[str, Any]:
        """The same in a chat."""
        return self.model_dump()


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


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    """Raise `ApiError` for fields that this server, or one of its APIs, does not have.

    Args:
        extra: the fields of a body that its class does not list.
        refused: fields that cannot be served, unless they are empty, and what to do instead.
        renamed: fields of chats that the API has under another name; empty: not at all.
    """
    for name, value in (extra or {}).items():
        if name in refused and value not in (None, False, "", [], {}):
            raise unsupported(name, f"{name}: {refused[name]}")
        if name in renamed:
            hint = f"; use {renamed[name]}" if renamed[name] else ""
            message = f"{name} is not a parameter of this path{hint}"
            raise ApiError(400, message, "unknown_parameter", param=name)
