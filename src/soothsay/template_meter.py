"""Counts what rendering a chat template costs, so that it ends whatever the template and the messages are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.runtime import LoopContext

MAX_WORK = 5 * 10**8
"""Limit of the work of one rendering, in estimated nanoseconds. Real templates take a millisecond."""

MAX_MADE = 2**25
"""Limit of the bytes of all texts and lists that one rendering makes, before they are freed again. A
conversation of 1 MB takes about 4 MB."""

PER_NODE = 100
"""Work of one node of a template's syntax tree."""

PER_VALUE = 150
"""Work of looking at one value in a list or an object, and the bytes that a value takes at least."""

MAX_BITS = 8192
"""Limit of the size of integers in bits."""


class TemplateLimit(jinja2.TemplateRuntimeError):
    """A template asked for more work or memory than is allowed."""


class Meter:
    """Adds up the cost of one rendering. Its methods raise `TemplateLimit` before the limit is passed."""

    def __init__(self) -> None:
        self.work, self.made = 0, 0

    def step(self, work: int) -> None:
        """Count work."""
        self.work += work
        if self.work > MAX_WORK:
            raise TemplateLimit("it takes too many steps")

    def make(self, size: int) -> None:
        """Count bytes that will be made."""
        self.made += size
        if self.made > MAX_MADE:
            raise TemplateLimit(f"it makes more than {MAX_MADE >> 20} MiB of text")

    def look(self, value: Any) -> int:
        """Count the work of looking at every value inside `value`, and return their size in bytes."""
        size = len(value) if type(value) is str else weigh(value, MAX_WORK - self.work)
        self.step(size)
        return size

    def result(self, value: Any) -> Any:
        """Count a result that was made, and return it. Items of an iterator count when they are asked for."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, list | tuple | dict):
            self.make(PER_VALUE * len(value))
        elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return self._counted(value)
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step(4 * PER_VALUE)
            yield value


def weigh(value: Any, limit: int) -> int:
    """Estimate the bytes of a value written as text, with all that is inside. Stops above `limit`.

    A list that is in itself twice counts twice, as it would be written.
    """
    total, left = 0, [value]
    while left and total <= limit:
        value = left.pop()
        total += PER_VALUE
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            total += 2 * PER_VALUE * len(value)
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            total += PER_VALUE * len(value)
            left += value
        elif isinstance(value, range):
            total += PER_VALUE * len(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3
    return total


_current: ContextVar[Meter] = ContextVar("meter")


def meter() -> Meter:
    """The meter of the rendering that runs. Raises `LookupError` if none runs."""
    return _current.get()


@contextmanager
def metering() -> Iterator[Meter]:
    """Count from zero for the time of the block."""
    fresh = Meter()
    token = _current.set(fresh)
    try:
        yield fresh
    finally:
        _current.reset(token)
