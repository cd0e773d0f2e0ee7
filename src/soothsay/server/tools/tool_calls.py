"""Splits an answer into text, thoughts and tool calls, however it is cut into pieces.

`FramedParser` is the frame of readers of calls between tags. What is not exactly a call stays in the text.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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


OPEN, CLOSE = "<tool_call>", "</tool_call>"
ON_LINES = f"{OPEN}\n", f"\n{CLOSE}"

MAX_NAME = 256
"""Limit of a function's name in characters, where only tags say where it ends."""

NAME = rf"[\w.-]{{1,{MAX_NAME}}}+"
"""A pattern of a function's name."""


class FramedParser(ToolCallParser):
    """Finds calls that stand between tags. White space around calls is not part of the text.

    Inside of the tags is JSON: `{"name": ..., "arguments": {...}}`, or a list of this. A family with another
    form inside overrides `read`.
    """

    frames: ClassVar[Sequence[tuple[str, str]]]
    """Tags before and after a call. An empty second one: the call ends where the next one begins."""

    signs: ClassVar[Sequence[str]] = ()
    """What is in the prompts of the families that write such calls."""

    forced: ClassVar[tuple[str, str] | None] = None
    """Text before and after a forced call, in JSON; None: the first tags of `frames`."""

    openings: ClassVar[Sequence[str]] = ()
    """Texts with which calls begin; empty: the first tags of `frames`."""

    trailer: ClassVar[str] = ""
    """A tag that may follow calls, and is dropped there."""

    def __init__(self, tools: Tools = ()) -> None:
        self._tools = tools
        self._held = ""
        self._after_call = self._trailer_may_come = False  # only white space has come since a call

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """The calls between two tags; none if this is not exactly one call or more. None: read it as JSON.

        Args:
            inside: the text between the tags.
            bare: whether the tag was not the first of `frames`.
            closed: whether the second tag has come.
        """
        return None

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Return the text up to the first character that may belong to a call, and the complete calls.

        The last call may lack its closing tag, if an end token replaced it.
        """
        self._held += text
        self._skip_after_call()
        content, calls = "", list[ToolCall]()
        while (start := self._start()) is not None:
            begin, frame = start
            inner = begin + len(self.frames[frame][0])
            end = self._end(inner, frame)
            if end is None:
                break
            found = self._calls(self._held[inner : end[0]], frame, closed=True)
            content += self._held[:begin].rstrip() if found else self._held[: end[1]]
            calls += found
            self._held = self._held[end[1] :]
            self._after_call = self._trailer_may_come = bool(found)
            self._skip_after_call()
        if final:
            rest = self._last(start)
            return ParsedPart(content + rest.content, [*calls, *rest.calls])
        certain = self._num_certain() if start is None else len(self._held[: start[0]].rstrip())
        content, self._held = content + self._held[:certain], self._held[certain:]
        return ParsedPart(content, calls)

    def _last(self, start: tuple[int, int] | None) -> ParsedPart:
        """What the held text is at the end of the answer. `start`: see `_start`."""
        held, self._held = self._held, ""
        if start is None:
            return ParsedPart(held)
        begin, frame = start
        inside = held[begin + len(self.frames[frame][0]) :]
        found = self._calls(inside, frame, closed=not self.frames[frame][1])
        return ParsedPart(held[:begin].rstrip(), found) if found else ParsedPart(held)

    def _calls(self, inside: str, frame: int, *, closed: bool) -> Sequence[ToolCall]:
        try:
            found = self.read(inside, bare=frame > 0, closed=closed)
            return as_calls(parsed_json(inside.strip())) if found is None else found
        except RecursionError:  # arguments that are nested too deep
            return []

    def _start(self) -> tuple[int, int] | None:
        """Where the first call in the held text begins, and the number of its frame."""
        found = [(self._held.find(tag), number) for number, (tag, _) in enumerate(self.frames)]
        return min(((place, number) for place, number in found if place >= 0), default=None)

    def _end(self, inner: int, frame: int) -> tuple[int, int] | None:
        """Where the inside of a call ends, and where the text after it begins; None: it has not come yet."""
        opening, closing = self.frames[frame]
        end = self._held.find(closing or opening, inner)
        return None if end < 0 else (end, end + len(closing))

    def _skip_after_call(self) -> None:
        if not self._after_call:
            return
        self._held = self._held.lstrip()
        if self._trailer_may_come and self.trailer and self._held.startswith(self.trailer):
            self._held = self._held.removeprefix(self.trailer).lstrip()
            self._trailer_may_come = False
        partial = self._trailer_may_come and self.trailer.startswith(self._held)
        self._after_call = not self._held or partial

    def _num_certain(self) -> int:
        """Number of characters before any white space or partial tag at the end, which may begin a call."""
        if self._after_call:
            return 0  # it may become the trailer
        text = self._held
        cut = max(overlap(text, tag) for tag, _ in self.frames)
        return len(text[: len(text) - cut].rstrip())


def named_call(name: str, arguments: str) -> list[ToolCall] | None:
    """The call of a function with arguments in JSON; None if there is no name, or no JSON."""
    values = parsed_json(arguments.strip())
    return None if values is None or not is_name(name) else [ToolCall(name, to_json(values))]


def as_calls(value: Any, **fields: Any) -> list[ToolCall]:
    """The calls that a JSON value is, or the values in a list; none if any of them is no call.

    `fields`: see `as_call`.
    """
    calls = [as_call(one, **fields) for one in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if all(calls) else []


def as_call(
    value: Any, *, name: str = "name", arguments: str = "arguments", short_ids: bool = False
) -> ToolCall | None:
    """The call that a JSON value is; None if it is none.

    Args:
        value: of any type.
        name: the field that has the function's name.
        arguments: the field that has the arguments.
        short_ids: whether the id of a call must have nine letters and digits. Then its own is kept if it has.
    """
    if not isinstance(value, dict) or not isinstance(called := value.get(name), str):
        return None
    given = value.get(arguments, {})
    try:
        text = encodable(given) if isinstance(given, str) else to_json(given)
    except RecursionError:
        return None
    if not short_ids:
        return ToolCall(encodable(called), text)
    told = str(value.get("id"))
    return ToolCall(encodable(called), text, told if re.fullmatch(r"[A-Za-z0-9]{9}", told) else short_id())


def to_json(value: Any) -> str:
    """JSON text that can be sent."""
    return encodable(json.dumps(value, ensure_ascii=False))


def short_id() -> str:
    """A new id of nine letters and digits."""
    return secrets.token_hex(5)[:9]


def is_name(text: str) -> bool:
    """Whether a text may be the name of a function."""
    return re.fullmatch(NAME, text) is not None


def encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def parsed_json(text: str) -> Any:
    """The JSON value that a text is; None if it is not exactly one."""
    value, end = first_json(text)
    return value if end == len(text) else None


def first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of a text, and where it ends; None and 0 if there is none."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _finite(text: str) -> float:
    """A number of JSON, which has no NaN and no infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
