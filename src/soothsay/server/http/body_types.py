"""Types of the fields of bodies, and how parts of a body that have several forms are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

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
