"""What an answer is split into: text for the user, thoughts, and tool calls."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""The tools of a request, as chats describe them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object. What is none, or cannot be sent, becomes its field `value`."""
        try:
            value = json.loads(self.arguments)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            value = self.arguments
        return value if isinstance(value, dict) else {"value": value}


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """A part of an answer: text for the user, complete calls, and thoughts."""

    content: str = ""
    calls: Sequence[ToolCall] = ()
    reasoning: str = ""

    def __add__(self, other: ParsedPart) -> ParsedPart:
        calls = [*self.calls, *other.calls]
        return ParsedPart(self.content + other.content, calls, self.reasoning + other.reasoning)


class ToolCallParser(ABC):
    """Splits one answer into text, thoughts and tool calls while it streams.

    The sum of all parts does not depend on how the answer is cut into pieces.
    """

    @abstractmethod
    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Read the next piece. Returns the text and the calls that later pieces cannot change.

        `final`: it is the last piece. Then nothing is held back.
        """

    def push(self, text: str) -> ParsedPart:
        """Read a piece that is not the last one."""
        return self.parse(text)

    def end(self) -> ParsedPart:
        """End the answer. Returns what was held back."""
        return self.parse("", final=True)


def overlap(text: str, tag: str) -> int:
    """Number of characters at the end of a text that may begin a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class PlainParser(ToolCallParser):
    """Finds no calls: the whole answer is text."""

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Return all of it as text."""
        return ParsedPart(text)


class OneCall(ToolCallParser):
    """Drops all calls but the first one that another parser finds, as `parallel_tool_calls: false` asks."""

    def __init__(self, parser: ToolCallParser):
        self._parser, self._called = parser, False

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Read the next piece."""
        part = self._parser.parse(text, final=final)
        calls = [] if self._called else part.calls[:1]
        self._called = self._called or bool(calls)
        return ParsedPart(part.content, calls, part.reasoning)
