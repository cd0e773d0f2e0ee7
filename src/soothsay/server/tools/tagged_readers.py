"""Finds tool calls whose arguments stand in tags, each as text or as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from soothsay.server.tools.framed_parser import CLOSE, ON_LINES, OPEN, FramedParser, is_name, to_json
from soothsay.server.tools.tool_arguments import schema_of, typed
from soothsay.server.tools.tool_calls import ToolCall, Tools


class QwenCoderParser(FramedParser):
    """Finds calls of the form `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with line breaks around names and values. The first tag is
    sometimes missing.
    """

    frames, trailer = ((OPEN, CLOSE), ("<function=", "</function>")), CLOSE
    signs: ClassVar[Sequence[str]] = ("<parameter=",)
    forced: ClassVar[tuple[str, str] | None] = ON_LINES

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
        found = _all_matches(self._PARAMETER, rest) if tag and is_name(name) else None
        if found is None:
            return []
        return [_call(self._tools, name, {key: _without_breaks(value) for key, value in found})]


class SeedParser(QwenCoderParser):
    """Finds calls as Qwen3-Coder's in other tags. Seed-OSS writes them."""

    frames = (("<seed:tool_call>", "</seed:tool_call>"), ("<function=", "</function>"))
    trailer = "</seed:tool_call>"
    signs, forced = (trailer,), None


class GlmParser(FramedParser):
    """Finds calls of the form `<tool_call>F<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`.

    GLM 4.5 and later write them.
    """

    frames, signs, forced = ((OPEN, CLOSE),), ("<arg_key>",), ON_LINES

    _PAIR = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        first = inside.find("<arg_key>")
        name, rest = (inside, "") if first < 0 else (inside[:first], inside[first:])
        name = name.strip()
        found = _all_matches(self._PAIR, rest)
        known = found or any(tool["function"]["name"] == name for tool in self._tools)
        if found is None or not (closed and known and is_name(name)):
            return super().read(inside, bare=bare, closed=closed)
        return [_call(self._tools, name, {key.strip(): value for key, value in found})]


class MiniMaxParser(FramedParser):
    """Finds `<minimax:tool_call><invoke name="F"><parameter name="P">value</parameter></invoke>...`.

    MiniMax M2 writes them. One pair of outer tags may have several calls.
    """

    frames, signs = (("<minimax:tool_call>", "</minimax:tool_call>"),), ("<minimax:tool_call>",)

    _CALL = re.compile(r"\s*<invoke name=\"?([\w.-]{1,256}+)\"?>(.*?)</invoke>", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter name=\"?([^<>\"\n]*)\"?>(.*?)</parameter>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        found = _all_matches(self._CALL, inside)
        if not found:
            return super().read(inside, bare=bare, closed=closed)
        calls = []
        for name, parameters in found:
            if (pairs := _all_matches(self._PARAMETER, parameters)) is None:
                return []
            calls.append(_call(self._tools, name, {key: _without_breaks(value) for key, value in pairs}))
        return calls


def _call(tools: Tools, name: str, texts: Mapping[str, str]) -> ToolCall:
    """A call with arguments as texts, which get the types of the tool's schema."""
    schema = schema_of(tools, name)
    return ToolCall(name, to_json({key: typed(text, key, schema) for key, text in texts.items()}))


def _without_breaks(text: str) -> str:
    """A value without the line break before and after it."""
    return text.removeprefix("\n").removesuffix("\n")


def _all_matches(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """The two groups of matches that follow each other; None if a text has anything but such matches."""
    groups, place = [], 0
    while (found := pattern.match(text, place)) is not None:
        groups.append((found[1], found[2]))
        place = found.end()
    return None if text[place:].strip() else groups
