"""Finds tool calls in the text of an answer, in the formats with JSON that families of models write."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from soothsay.server.tools.tool_calls import (
    CLOSE,
    MAX_NAME,
    ON_LINES,
    OPEN,
    FramedParser,
    ParsedPart,
    ToolCall,
    ToolCallParser,
    Tools,
    as_call,
    as_calls,
    first_json,
    named_call,
    parsed_json,
    short_id,
    to_json,
)

FENCE = "```json"
"""A line of Markdown before JSON. Three backquotes end it."""

PYTHON_TAG = "<|python_tag|>"
"""A special token that may come before Llama 3's calls."""

MAX_BEGINNING = 512
"""Limit of the characters that tell whether an answer begins like a call without tags."""


class HermesParser(FramedParser):
    """Finds calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Hermes, Qwen 2.5 and 3, and many others write them. Qwen2.5-Coder leaves out the tags, and may write a
    fence of Markdown in their place. This counts as calls if the answer consists of calls of the request's
    tools, and of nothing else.
    """

    frames, signs, forced = ((OPEN, CLOSE),), (OPEN,), ON_LINES

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._beginnings = [f'{fence}{{"name":"{name}"' for fence in ("", FENCE) for name in self._names]
        self._bare = ""  # the answer so far, while it may consist of calls without tags
        self._may_be_bare = True

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Hold the answer back while it may consist of calls without tags."""
        if not self._may_be_bare:
            return super().parse(text, final=final)
        self._bare += text
        start = "".join(self._bare[:MAX_BEGINNING].split())
        if any(one.startswith(start) or start.startswith(one) for one in self._beginnings):
            if not final:
                return ParsedPart()
            if calls := self._bare_calls():
                return ParsedPart("", calls)
        self._may_be_bare = False
        return super().parse(self._bare, final=final)

    def _bare_calls(self) -> Sequence[ToolCall]:
        """The calls that the whole answer consists of; none if there is anything else."""
        rest = self._bare.strip().removeprefix(FENCE).removesuffix("```").removesuffix(CLOSE).strip()
        return _only_calls(rest, self._names, "arguments", required=True)


class AprielParser(FramedParser):
    """Finds calls of the form `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`, as Apriel's."""

    frames, signs = (("<tool_calls>", "</tool_calls>"),), ("<tool_calls>",)


class GraniteParser(FramedParser):
    """Finds `<|tool_call|>[{"name": ..., "arguments": {...}}]`, which nothing closes.

    Granite 3 writes them. Phi-4-mini writes `<|/tool_call|>` after them.
    """

    frames, signs = (("<|tool_call|>", ""),), ("<|tool_call|>", "<|/tool|>")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        return as_calls(parsed_json(inside.strip().removesuffix("<|/tool_call|>").strip()))


class CommandParser(FramedParser):
    """Finds `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`.

    Command R7B and Command A write them, with a number as the id of each call. Their templates make these
    numbers anew, so the ids are our own.
    """

    frames, signs = (("<|START_ACTION|>", "<|END_ACTION|>"),), ("<|START_ACTION|>",)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        return as_calls(parsed_json(inside.strip()), name="tool_name", arguments="parameters") or None


class MistralParser(FramedParser):
    """Finds `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]F[ARGS]{...}`.

    Mistral's models write the first form, and the second one since Mistral Small 3.2. Their templates accept
    only ids of nine letters and digits.
    """

    frames, signs, forced = (("[TOOL_CALLS]", ""),), ("[TOOL_CALLS]",), ("[TOOL_CALLS] [", "]")

    _NAMED = re.compile(r"([\w.-]{1,256}+)\s*+(?:\[CALL_ID\]\s*+(\w{1,64}+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        inside = inside.strip()
        named = self._NAMED.match(inside)
        if named is not None:
            values = parsed_json(inside[named.end() :])
            return [] if values is None else [ToolCall(named[1], to_json(values), named[2] or short_id())]
        return as_calls(parsed_json(inside), short_ids=True)


class KimiParser(FramedParser):
    """Finds `<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    Kimi K2 writes them in a section with tags of its own. It wants to see its ids again.
    """

    _CALL, _SECTION = ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_calls_section_begin|>"
    frames = (_CALL, (_SECTION + _CALL[0], _CALL[1]))
    trailer, signs = "<|tool_calls_section_end|>", ("<|tool_call_argument_begin|>",)

    _ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        called, tag, arguments = inside.partition("<|tool_call_argument_begin|>")
        found = self._ID.fullmatch(called.strip()[:MAX_NAME]) if tag else None
        calls = None if found is None else named_call(found[1], arguments)
        return None if calls is None else [replace(calls[0], id=called.strip())]


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
    signs = (separator,)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        name, tag, arguments = inside.partition(self.separator)
        if not arguments.lstrip().startswith("{"):
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        return named_call(name.strip(), arguments) if tag else None


class Llama3Parser(ToolCallParser):
    """Finds calls in an answer that consists of `{"name": ..., "parameters": {...}}`, joined by `;`.

    Llama 3 writes them. They name tools of the request: other JSON may be the answer itself.
    """

    def __init__(self, tools: Tools = ()) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._held = ""
        self._is_text = False  # the answer begins unlike a call

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Return the text if the answer begins unlike a call. Otherwise hold it back to its end."""
        self._held += text
        start = self._held.lstrip().removeprefix(PYTHON_TAG).lstrip()
        self._is_text = self._is_text or (bool(start) and not start.startswith(("{", "<")))
        if not self._is_text and not final:
            return ParsedPart()
        held, self._held = self._held, ""
        return ParsedPart(held) if self._is_text else self._whole(held)

    def _whole(self, held: str) -> ParsedPart:
        """The calls if the answer consists of calls only. Otherwise the text."""
        rest = held.strip().removeprefix(PYTHON_TAG).strip()
        calls = _only_calls(rest, self._names, "parameters", between="; \n")
        return ParsedPart("", calls) if calls else ParsedPart(held)


def _only_calls(
    text: str, names: Collection[str], arguments: str, *, required: bool = False, between: str | None = None
) -> list[ToolCall]:
    """The calls that a text consists of; none if there is anything else.

    Args:
        text: begins with the first call.
        names: of the tools that may be called.
        arguments: the field that has the arguments.
        required: whether a call must have this field.
        between: characters that may stand between two calls; None: white space.
    """
    calls = []
    while text:
        value, end = first_json(text)
        call = as_call(value, arguments=arguments)
        if call is None or call.name not in names or (required and arguments not in value):
            return []
        calls.append(call)
        text = text[end:].lstrip(between)
    return calls
