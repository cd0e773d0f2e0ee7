"""Parses specifications of drafters: `"eagle3"`, `"draft-model(model=path, depth=4)"`, `"suffix > eagle3"`,
`"suffix + mtp"`, `"suffix | mtp"`, `"path/to/file.py:Class(size=2)"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from soothsay.errors import DrafterError

OPERATORS = ("|", ">", "+")
"""Operators between drafters, in rising order of precedence: `a > b + c` is `a > (b + c)`."""


@dataclass(frozen=True, slots=True)
class Named:
    """One drafter, with its options."""

    name: str  # in the registry, or FILE.py:CLASS
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Composed:
    """Several specifications, composed by one operator."""

    operator: str  # one of OPERATORS
    parts: tuple[Named | Composed, ...]


def parse(spec: str) -> Named | Composed:
    """Parse a specification. Raises `DrafterError` if it is malformed."""
    for operator in OPERATORS:
        parts = list(_split(spec, operator))
        if len(parts) > 1:
            if not all(part.strip() for part in parts):
                raise DrafterError(f"drafter {spec.strip()!r}: a drafter is missing beside {operator!r}")
            return Composed(operator, tuple(parse(part) for part in parts))
    return _named(spec)


def _named(spec: str) -> Named:
    """Parse `name(key=value, ...)`. A value that is no Python literal is plain text, such as a path."""
    matched = re.fullmatch(r"\s*+((?:[^():]+\.py:)?[\w-]++)\s*+(?:\((.*)\)\s*+)?", spec, re.DOTALL)
    if matched is None:
        raise DrafterError(
            f"drafter {spec!r} is not of the form name or name(key=value, ...), or several of them with |, > "
            "or + between; a class of your own is FILE.py:CLASS"
        )
    name, inside = matched.groups()
    options: dict[str, Any] = {}
    for item in _split(inside or "", ","):
        if not item.strip():
            continue
        key, equals, value = item.partition("=")
        if not equals:
            raise DrafterError(f"drafter {spec!r}: {item.strip()!r} is not of the form key=value")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    return Named(name, options)


def _split(text: str, separator: str) -> Iterator[str]:
    """Split `text` at each separator that is outside brackets and quoted values."""
    begin, depth, quote, last = 0, 0, "", ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and last in ("=", "(", ",", "["):  # elsewhere it is an apostrophe
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == separator and depth == 0:
            yield text[begin:i]
            begin = i + 1
        last = last if character.isspace() else character
    yield text[begin:]
