"""The frame of readers of tool calls: finds calls between tags, however an answer is cut into pieces.

What is not exactly a call stays in the text, unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

from soothsay.server.tools.tool_arguments import parsed_json
from soothsay.server.tools.tool_calls import ParsedPart, ToolCall, ToolCallParser, Tools, overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ON_LINES = f"{OPEN}\n", f"\n{CLOSE}"

MAX_NAME = 256
"""Limit of a function's name in characters, where only tags say where it ends."""


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

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """The calls between two tags; none if this is not exactly one call or more.

        Args:
            inside: the text between the tags.
            bare: whether the tag was not the first of `frames`.
            closed: whether the second tag has come.
        """
        return as_calls(parsed_json(inside.strip()))

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
            return self.read(inside, bare=frame > 0, closed=closed)
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
    return re.fullmatch(rf"[\w.-]{{1,{MAX_NAME}}}", text) is not None


def encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
