"""Finds tool calls whose arguments stand in tags, each as text or as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from soothsay.server.tools.framed_parser import CLOSE, OPEN, FramedParser, is_name, to_json
from soothsay.server.tools.tool_arguments import schema_of, typed
from soothsay.server.tools.tool_calls import ToolCall


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
        found = list(_matches(self._PARAMETER, rest)) if tag and is_name(name) else None
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
        if not (closed and known and is_name(name)) or rest[found[-1].end() if found else 0 :].strip():
            return super().read(inside, bare=bare, closed=closed)
        schema = schema_of(self._tools, name)
        values = {match[1].strip(): typed(match[2], match[1].strip(), schema) for match in found}
        return [ToolCall(name, to_json(values))]


class MiniMaxParser(FramedParser):
    """Finds `<minimax:tool_call><invoke name="F"><parameter name="P">value</parameter></invoke>...`.

    MiniMax M2 writes them. One pair of outer tags may have several calls.
    """

    frames = (("<minimax:tool_call>", "</minimax:tool_call>"),)

    _CALL = re.compile(r"\s*<invoke name=\"?([\w.-]{1,256}+)\"?>(.*?)</invoke>", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter name=\"?([^<>\"\n]*)\"?>(.*?)</parameter>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        found = list(_matches(self._CALL, inside))
        calls = [self._call(match[1], match[2]) for match in found]
        if not found or inside[found[-1].end() :].strip():
            return super().read(inside, bare=bare, closed=closed)
        return [call for call in calls if call] if all(calls) else []

    def _call(self, name: str, inside: str) -> ToolCall | None:
        found = list(_matches(self._PARAMETER, inside))
        if inside[found[-1].end() if found else 0 :].strip():
            return None
        schema = schema_of(self._tools, name)
        return ToolCall(name, to_json({m[1]: typed(_without_breaks(m[2]), m[1], schema) for m in found}))


def _without_breaks(text: str) -> str:
    """A value without the line break before and after it."""
    return text.removeprefix("\n").removesuffix("\n")


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches that follow each other, from the start of a text on."""
    place = 0
    while (found := pattern.match(text, place)) is not None:
        yield found
        place = found.end()
