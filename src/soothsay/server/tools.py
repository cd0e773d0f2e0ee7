"""Finds tool calls in the text of an answer, and makes grammars that force a tool call.

A model writes tool calls as text, in the format of its family. The chat template shows which format: it adds
instructions to the prompt when there are tools.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soothsay.errors import RequestError
from soothsay.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spacing of JSON in a forced call, in llguidance's terms. Chat templates write calls with it."""

PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """A part of an answer: text for the user, and complete calls."""

    content: str = ""
    calls: Sequence[ToolCall] = ()


class ToolCallParser(ABC):
    """Splits one answer into text and tool calls while it streams.

    The sum of all parts does not depend on how the answer is cut into pieces.
    """

    @abstractmethod
    def push(self, text: str) -> ParsedPart:
        """Read the next piece. Returns the text and the calls that later pieces cannot change."""

    @abstractmethod
    def end(self) -> ParsedPart:
        """End the answer. Returns what was held back."""


class PlainParser(ToolCallParser):
    """Finds no calls: the whole answer is text."""

    def push(self, text: str) -> ParsedPart:
        """Return all of it as text."""
        return ParsedPart(text)

    def end(self) -> ParsedPart:
        """Return nothing, since nothing was held back."""
        return ParsedPart()


class OneCall(ToolCallParser):
    """Drops all calls but the first one that another parser finds, as `parallel_tool_calls: false` asks."""

    def __init__(self, parser: ToolCallParser):
        self._parser, self._called = parser, False

    def push(self, text: str) -> ParsedPart:
        """Read the next piece."""
        return self._first(self._parser.push(text))

    def end(self) -> ParsedPart:
        """End the answer."""
        return self._first(self._parser.end())

    def _first(self, part: ParsedPart) -> ParsedPart:
        calls = [] if self._called else part.calls[:1]
        self._called = self._called or bool(calls)
        return ParsedPart(part.content, calls)


class HermesParser(ToolCallParser):
    """Finds calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Hermes, Qwen 2.5 and 3, and many others write them. White space around calls is not part of the text. A
    call that is not valid JSON stays in the text, unchanged.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # only white space has come since a call

    def push(self, text: str) -> ParsedPart:
        """Return the text up to the first character that may belong to a call, and the complete calls."""
        self._held += text
        self._skip_space()
        content, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            call = _parse_call(self._held[start + len(OPEN) : end], "arguments")
            if call is None:
                content += self._held[: end + len(CLOSE)]
            else:
                content += self._held[:start].rstrip()
                calls.append(call)
            self._held = self._held[end + len(CLOSE) :]
            self._after_call = call is not None
            self._skip_space()
        certain = len(self._held[:start].rstrip()) if start >= 0 else self._num_certain()
        content, self._held = content + self._held[:certain], self._held[certain:]
        return ParsedPart(content, calls)

    def end(self) -> ParsedPart:
        """Return what was held back. The last call may lack its closing tag, if an end token replaced it."""
        held, self._held = self._held, ""
        before, tag, inside = held.partition(OPEN)
        call = _parse_call(inside, "arguments") if tag else None
        return ParsedPart(held) if call is None else ParsedPart(before.rstrip(), [call])

    def _skip_space(self) -> None:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held

    def _num_certain(self) -> int:
        """Number of characters before any white space or partial tag at the end, which may begin a call."""
        text = self._held
        cut = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
        return len(text[: len(text) - cut].rstrip())


class Llama3Parser(ToolCallParser):
    """Finds calls in an answer that consists of `{"name": ..., "parameters": {...}}`, joined by `;`.

    Llama 3 writes them.
    """

    def __init__(self) -> None:
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
            value, end = _first_json(rest)
            call = _as_call(value, "parameters")
            if call is None:
                return ParsedPart(held)
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        return ParsedPart("", calls) if calls else ParsedPart(held)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools."""

    supported: bool
    """Whether the chat template describes tools to the model."""

    parser: Callable[[], ToolCallParser] = PlainParser
    """Makes the parser of one answer."""

    arguments: str = "arguments"
    """Name of the field of a call that has the arguments."""

    frame: tuple[str, str] | None = None
    """Text before and after a call; None: the format is unknown."""

    def call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """A grammar, in llguidance's Lark, for one call of one of the tools. None: the format is unknown."""
        if self.frame is None:
            return None
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    self.arguments: tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        schema = {"anyOf": calls, "x-guidance": SPACING}
        before, after = (f"{json.dumps(text)} " if text else "" for text in self.frame)
        return f"start: {before}call {after}\ncall: %json {json.dumps(schema)}"

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ToolFormat:
        """Detect the format from what the chat template adds to a prompt for a tool."""
        if tokenizer is None or not tokenizer.has_chat_template:
            return cls(supported=False)
        messages = [{"role": "user", "content": "?"}]
        try:
            without, prompt = tokenizer.render(messages), tokenizer.render(messages, tools=[PROBE])
        except RequestError:
            return cls(supported=False)
        if prompt == without:
            return cls(supported=False)
        if OPEN in prompt:
            return cls(supported=True, parser=HermesParser, frame=(f"{OPEN}\n", f"\n{CLOSE}"))
        if '{"name": function name, "parameters"' in prompt:
            return cls(supported=True, parser=Llama3Parser, arguments="parameters", frame=("", ""))
        return cls(supported=True)


def _parse_call(text: str, arguments: str) -> ToolCall | None:
    """The call that a text consists of; None if it is not exactly one call."""
    value, end = _first_json(text.strip())
    return _as_call(value, arguments) if end == len(text.strip()) else None


def _first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of a text, and where it ends; None and 0 if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _as_call(value: Any, arguments: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    except RecursionError:
        return None
    return ToolCall(_encodable(value["name"]), _encodable(text))


def _encodable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
