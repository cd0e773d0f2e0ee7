"""Tools: what the chat template tells the model of them, and the calls in what the model says.

Models call tools in text, each family in its own way. Which one is read off the chat template: what it adds
to a prompt when there are tools.
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
"""Calls are written the way that chat templates write them, in llguidance's terms."""

PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Said:
    """What is certain of an answer: text for the reader, and calls."""

    content: str = ""
    calls: Sequence[ToolCall] = ()


class Reader(ABC):
    """Reads an answer as it comes, in pieces of any size: the sum of what is said does not depend on them."""

    @abstractmethod
    def push(self, text: str) -> Said:
        """What has become certain with `text`."""

    @abstractmethod
    def end(self) -> Said:
        """What is left when the answer has ended."""


class Plain(Reader):
    """No calls."""

    def push(self, text: str) -> Said:
        """All of it is text."""
        return Said(text)

    def end(self) -> Said:
        """Nothing is held back."""
        return Said()


class Hermes(Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others.

    White space around calls is not part of the text. A call that is not JSON is text, as it was said.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # and nothing but white space since

    def push(self, text: str) -> Said:
        """Text up to what may become a call, and the calls that are complete."""
        self._held += text
        self._skip_space()
        content, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            call = _call(self._held[start + len(OPEN) : end], "arguments")
            if call is None:
                content += self._held[: end + len(CLOSE)]
            else:
                content += self._held[:start].rstrip()
                calls.append(call)
            self._held = self._held[end + len(CLOSE) :]
            self._after_call = call is not None
            self._skip_space()
        certain = len(self._held[:start].rstrip()) if start >= 0 else self._certain()
        content, self._held = content + self._held[:certain], self._held[certain:]
        return Said(content, calls)

    def end(self) -> Said:
        """A call without its closing tag counts too: an end token may stand in its place."""
        held, self._held = self._held, ""
        before, tag, inside = held.partition(OPEN)
        call = _call(inside, "arguments") if tag else None
        return Said(held) if call is None else Said(before.rstrip(), [call])

    def _skip_space(self) -> None:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held

    def _certain(self) -> int:
        """Characters before the white space, or the beginning of a tag, that may belong to a call."""
        text = self._held
        cut = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
        return len(text[: len(text) - cut].rstrip())


class Llama3(Reader):
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several with `;` between: Llama 3."""

    def __init__(self) -> None:
        self._held = ""
        self._text = False  # it has begun like text

    def push(self, text: str) -> Said:
        """Text if the answer begins like text, and else nothing before its end."""
        self._held += text
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        self._text = self._text or (bool(start) and not start.startswith(("{", "<")))
        if not self._text:
            return Said()
        content, self._held = self._held, ""
        return Said(content)

    def end(self) -> Said:
        """The calls, if all of the answer is such."""
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix("<|python_tag|>").strip(), []
        while rest:
            said, end = _first_json(rest)
            call = _as_call(said, "parameters")
            if call is None:
                return Said(held)
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        return Said("", calls) if calls else Said(held)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model is told of tools, if it is, and how it calls them."""

    known: bool
    """Whether the chat template says anything of tools."""
    reader: Callable[[], Reader] = Plain
    arguments: str = "arguments"
    """What a call has its arguments under."""
    frame: tuple[str, str] | None = None
    """What stands before and behind a call; None: not known."""

    def forced(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """A grammar, in llguidance's Lark, of one call of one of `tools`; None if that is not known."""
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
        before, behind = (f"{json.dumps(text)} " if text else "" for text in self.frame)
        return f"start: {before}call {behind}\ncall: %json {json.dumps(schema)}"

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ToolFormat:
        """Read it off the chat template."""
        if tokenizer is None or not tokenizer.has_chat_template:
            return cls(known=False)
        messages = [{"role": "user", "content": "?"}]
        try:
            without, told = tokenizer.render(messages), tokenizer.render(messages, tools=[PROBE])
        except RequestError:
            return cls(known=False)
        if told == without:
            return cls(known=False)
        if OPEN in told:
            return cls(known=True, reader=Hermes, frame=(f"{OPEN}\n", f"\n{CLOSE}"))
        if '{"name": function name, "parameters"' in told:
            return cls(known=True, reader=Llama3, arguments="parameters", frame=("", ""))
        return cls(known=True)


def _call(text: str, arguments: str) -> ToolCall | None:
    """The call that `text` is, if it is one."""
    said, end = _first_json(text.strip())
    return _as_call(said, arguments) if end == len(text.strip()) else None


def _first_json(text: str) -> tuple[Any, int]:
    """The value that a text begins with, and where it ends; None and 0 if it is not JSON."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _as_call(said: Any, arguments: str) -> ToolCall | None:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    given = said.get(arguments, {})
    return ToolCall(said["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
