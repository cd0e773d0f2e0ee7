"""Reads JSON from strangers. What is too deep, has too many members or is ambiguous is refused.

Depth and members are counted in the bytes, before any object is made.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from soothsay.errors import SoothsayError

MAX_DEPTH = 64
"""Limit of nested objects and lists. Schemas of real tools have fewer than 20."""

MAX_MEMBERS = 32_768
"""Limit of fields, objects and lists together. One takes up to 2 KB after validation, so a body's take less
than 64 MB. A conversation of 10,000 messages has fewer."""

MAX_ITEMS = 1 << 20
"""Limit of fields and items together. Numbers and texts in lists take up to 60 bytes each. A body with 64
prompts of token ids has fewer."""

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or an unterminated one up to the end. It matches at every quote and never goes back, so that the
time is linear."""

BRACKETS = b"[]{}"
OTHERS = bytes(set(range(256)) - set(BRACKETS))
STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

DIGITS = bytes.maketrans(b"123456789", b"000000000")
LONG_NUMBER = b"0" * 19
"""Without so many digits in a row, all integers fit in 64 bits."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of half a character. Most come in pairs, which are one character."""


class JsonError(SoothsayError):
    """A text is not JSON, or not within the limits.

    Args:
        message: what is wrong.
        field: names of the fields that lead to the wrong value, joined by dots; empty: it has no place.
        valid: whether the text may be JSON.
    """

    def __init__(self, message: str, field: str = "", *, valid: bool = False):
        super().__init__(message)
        self.field, self.valid = field, valid


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Takes the place of an impossible value, until its field is found."""

    problem: str


class _Hooks:
    """What the parser calls for objects and numbers. `any_wrong`: whether a `_Wrong` was made."""

    def __init__(self) -> None:
        self.any_wrong = False

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            fields[twice] = self._wrong("the field is given twice")
        return fields

    def integer(self, text: str) -> int | _Wrong:
        if len(text) <= 20 and -(2**63) <= (number := int(text)) < 2**64:
            return number
        return self._wrong("the integer needs more than 64 bits")

    def number(self, text: str) -> float | _Wrong:
        number = float(text)
        return number if math.isfinite(number) else self._wrong("the number is too large")

    def constant(self, name: str) -> _Wrong:
        return self._wrong(f"{name} is not a value of JSON")

    def _wrong(self, problem: str) -> _Wrong:
        self.any_wrong = True
        return _Wrong(problem)


def read_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `JsonError`.

    Refuses what parsers understand differently: fields that are given twice, integers beyond 64 bits, numbers
    that are not finite, and halves of characters.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise JsonError(f"the text is not UTF-8: {error.reason} at byte {error.start}") from None
    bare = STRING.sub(b"", content)
    _check_structure(bare)
    hooks = _Hooks()
    try:
        value = json.loads(
            text,
            object_pairs_hook=hooks.object,
            parse_float=hooks.number,
            parse_int=hooks.integer if LONG_NUMBER in bare.translate(DIGITS) else None,
            parse_constant=hooks.constant,
        )
    except json.JSONDecodeError as error:
        several = "\n" in text.strip()
        place = f"line {error.lineno} column {error.colno}" if several else f"character {error.pos + 1}"
        raise JsonError(f"the text is not valid JSON: {error.msg} at {place}") from None
    except ValueError as error:
        raise JsonError(f"the text is not valid JSON: {error}") from None
    if hooks.any_wrong or SURROGATE.search(content):
        for path, problem in _problems(value, ()):
            raise JsonError(problem, ".".join(path), valid=True)
    return value


def _check_structure(bare: bytes) -> None:
    """Count members and depth in a text without its strings."""
    brackets = bare.translate(None, OTHERS)
    members = brackets.count(b"[") + brackets.count(b"{") + bare.count(b":")
    if members > MAX_MEMBERS:
        raise JsonError(f"the text has more than {MAX_MEMBERS} fields, objects and lists", valid=True)
    if bare.count(b",") > MAX_ITEMS:
        raise JsonError(f"the text has more than {MAX_ITEMS} items in its lists", valid=True)
    if len(brackets) > 2 * MAX_MEMBERS:
        raise JsonError("the text is not valid JSON: it closes brackets that it has not opened")
    if max(accumulate(map(STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        message = f"the text has objects or lists nested deeper than {MAX_DEPTH}"
        raise JsonError(message, valid=True)


def _problems(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The impossible values in a value, each with its place and what is wrong."""
    if isinstance(value, _Wrong):
        yield path, value.problem
    elif isinstance(value, str) and not _is_whole(value):
        yield path, "the text has half of a character (a lone surrogate)"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, (*path, str(index)))
    elif isinstance(value, dict):
        for name, item in value.items():
            if not _is_whole(name):
                yield path, "the name of a field has half of a character (a lone surrogate)"
            yield from _problems(item, (*path, name))


def _is_whole(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
