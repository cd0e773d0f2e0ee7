"""Finds tool calls in the text of an answer, in the formats that families of models write.

What is not exactly a call stays in the text, unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from soothsay.server.tool_arguments import first_json, parsed_json, schema_of, typed
from soothsay.server.tool_calls import ParsedPart, ToolCall, ToolCallParser, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_NAME = 256
"""Limit of a function's name in characters, where only tags say where it ends."""


class FramedParser(ToolCallParser):
    """Finds calls that stand between tags. White space around calls is not part of the text.

    Inside of the tags is JSON: `{"name": ..., "arguments": {...}}`, or a list of this. A family with another
    form inside overrides `read`.
    """

    frames: ClassVar[Sequence[tuple[str, str]]]
    """Tags before and after a call. An empty second one: the call ends where the next one begins."""

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
        value = parsed_json(inside.strip())
        calls = [as_call(one, "arguments") for one in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call] if all(calls) else []

    def push(self, text: str) -> ParsedPart:
        """Return the text up to the first character that may belong to a call, and the complete calls."""
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
        certain = self._num_certain() if start is None else len(self._held[: start[0]].rstrip())
        content, self._held = content + self._held[:certain], self._held[certain:]
        return ParsedPart(content, calls)

    def end(self) -> ParsedPart:
        """Return what was held back. The last call may lack its closing tag, if an end token replaced it."""
        start, held = self._start(), self._held
        self._held = ""
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
        longest = max(len(tag) for tag, _ in self.frames)
        cut = next((n for n in range(min(longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        return len(text[: len(text) - cut].rstrip())

    def _may_begin(self, text: str) -> bool:
        return any(tag.startswith(text) and len(text) < len(tag) for tag, _ in self.frames)


class HermesParser(FramedParser):
    """Finds calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Hermes, Qwen 2.5 and 3, and many others write them.
    """

    frames = ((OPEN, CLOSE),)


class AprielParser(FramedParser):
    """Finds calls of the form `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`, as Apriel's."""

    frames = (("<tool_calls>", "</tool_calls>"),)


class QwenCoderParser(FramedParser):
    """Finds calls of the form `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with line breaks around names and values. The first tag is
    sometimes missing.
    """

    frames = ((OPEN, CLOSE), ("<function=", "</function>"))
    trailer = CLOSE

    _PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>(.*?)</parameter>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        if not bare:
            inside = inside.strip()
            if not (inside.startswith("<function=") and inside.endswith("</function>")):
                return super().read(inside, bare=bare, closed=closed)
            inside = inside.removeprefix("<function=").removesuffix("</function>")
        elif not closed:
            return []
        name, tag, rest = inside.partition(">")
        found = list(_matches(self._PARAMETER, rest)) if tag and _is_name(name) else None
        if found is None or rest[found[-1].end() if found else 0 :].strip():
            return []
        schema = schema_of(self._tools, name)
        values = {match[1]: typed(_without_breaks(match[2]), match[1], schema) for match in found}
        return [ToolCall(name, to_json(values))]


class SeedParser(QwenCoderParser):
    """Finds calls as Qwen3-Coder's in other tags. Seed-OSS writes them."""

    frames = (("<seed:tool_call>", "</seed:tool_call>"), ("<function=", "</function>"))
    trailer = "</seed:tool_call>"


class GlmParser(FramedParser):
    """Finds calls of the form `<tool_call>F<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`.

    GLM 4.5 and later write them.
    """

    frames = ((OPEN, CLOSE),)

    _PAIR = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        first = inside.find("<arg_key>")
        name, rest = (inside, "") if first < 0 else (inside[:first], inside[first:])
        name = name.strip()
        found = list(_matches(self._PAIR, rest))
        known = found or any(tool["function"]["name"] == name for tool in self._tools)
        if not (closed and known and _is_name(name)) or rest[found[-1].end() if found else 0 :].strip():
            return super().read(inside, bare=bare, closed=closed)
        schema = schema_of(self._tools, name)
        values = {match[1].strip(): typed(match[2], match[1].strip(), schema) for match in found}
        return [ToolCall(name, to_json(values))]


class MistralParser(FramedParser):
    """Finds `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]F[ARGS]{...}`.

    Mistral's models write the first form, and the second one since Mistral Small 3.2. Their templates accept
    only ids of nine letters and digits.
    """

    frames = (("[TOOL_CALLS]", ""),)

    _NAMED = re.compile(r"([\w.-]{1,256}+)\s*+(?:\[CALL_ID\]\s*+(\w{1,64}+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        inside = inside.strip()
        named = self._NAMED.match(inside)
        if named is not None:
            values = parsed_json(inside[named.end() :])
            return [] if values is None else [ToolCall(named[1], to_json(values), named[2] or self._id())]
        value = parsed_json(inside)
        calls = [
            as_call(one, "arguments", self._id()) for one in (value if isinstance(value, list) else [value])
        ]
        return [call for call in calls if call] if all(calls) else []

    def _id(self) -> str:
        return secrets.token_hex(5)[:9]


class KimiParser(FramedParser):
    """Finds `<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    Kimi K2 writes them in a section with tags of its own. It wants to see its ids again.
    """

    _CALL, _SECTION = ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_calls_section_begin|>"
    frames = (_CALL, (_SECTION + _CALL[0], _CALL[1]))
    trailer = "<|tool_calls_section_end|>"

    _ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        called, tag, arguments = inside.partition("<|tool_call_argument_begin|>")
        found, values = self._ID.fullmatch(called.strip()[:MAX_NAME]), parsed_json(arguments.strip())
        if not tag or found is None or values is None:
            return super().read(inside, bare=bare, closed=closed)
        return [ToolCall(found[1], to_json(values), called.strip())]


def _wide(words: str) -> str:
    """A tag of DeepSeek's: its bars are U+FF5C, and its blanks U+2581."""
    blank = "\u2581"
    return f"<\uff5c{words.replace(' ', blank)}\uff5c>"


class DeepSeekParser(FramedParser):
    """Finds `<|tool_call_begin|>F<|tool_sep|>{...}<|tool_call_end|>`, with wide bars and low blanks.

    DeepSeek V3.1 writes them in a section with tags of its own. V3 and R1 write `function<|tool_sep|>F`, a
    line break, and the arguments as a block of code in Markdown.
    """

    _CALL, _SECTION = (_wide("tool call begin"), _wide("tool call end")), _wide("tool calls begin")
    frames = (_CALL, (_SECTION + _CALL[0], _CALL[1]))
    trailer = _wide("tool calls end")
    separator = _wide("tool sep")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        name, tag, arguments = inside.partition(self.separator)
        if not arguments.lstrip().startswith("{"):
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        values = parsed_json(arguments.strip())
        if not tag or not _is_name(name.strip()) or values is None:
            return super().read(inside, bare=bare, closed=closed)
        return [ToolCall(name.strip(), to_json(values))]


class Llama3Parser(ToolCallParser):
    """Finds calls in an answer that consists of `{"name": ..., "parameters": {...}}`, joined by `;`.

    Llama 3 writes them.
    """

    def __init__(self, tools: Tools = ()) -> None:
        self._held = ""
        self._is_text = False  # the answer begins unlike a call

    def push(self, text: str) -> ParsedPart:
        """Return the text if the answer begins unlike a call. Otherwise hold it back."""
        self._held += text
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        self._is_text = self._is_text or (bool(start) and not start.startswith(("{", "<")))
        if not self._is_text:
            return ParsedPart()
        content, self._held = self._held, ""
        return ParsedPart(content)

    def end(self) -> ParsedPart:
        """Return the calls if the answer consists of calls only. Otherwise return it as text."""
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix("<|python_tag|>").strip(), []
        while rest:
            value, end = first_json(rest)
            call = as_call(value, "parameters")
            if call is None:
                return ParsedPart(held)
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        return ParsedPart("", calls) if calls else ParsedPart(held)


def as_call(value: Any, arguments: str, own_id: str | None = None) -> ToolCall | None:
    """The call that a JSON value is, with its arguments in the field of this name; None if it is none.

    `own_id`: the id of a call that brings none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    try:
        text = _encodable(given) if isinstance(given, str) else to_json(given)
    except RecursionError:
        return None
    if own_id is None:
        return ToolCall(_encodable(value["name"]), text)
    told = str(value.get("id"))
    return ToolCall(_encodable(value["name"]), text, told if _is_short_id(told) else own_id)


def to_json(value: Any) -> str:
    """JSON text that can be sent."""
    return _encodable(json.dumps(value, ensure_ascii=False))


def _is_short_id(told: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9]{9}", told) is not None


def _is_name(text: str) -> bool:
    return re.fullmatch(rf"[\w.-]{{1,{MAX_NAME}}}", text) is not None


def _without_breaks(text: str) -> str:
    """A value without the line break before and after it."""
    return text.removeprefix("\n").removesuffix("\n")


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches that follow each other, from the start of a text on."""
    place = 0
    while (found := pattern.match(text, place)) is not None:
        yield found
        place = found.end()


def _encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
