"""Finds tool calls in notations that are neither JSON nor tags: Gemma 4's and LFM2's."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from soothsay.server.tools.framed_parser import FramedParser, is_name, to_json
from soothsay.server.tools.tool_arguments import MAX_LITERAL, WORDS, first_json, parsed_json
from soothsay.server.tools.tool_calls import ToolCall

MAX_DEPTH = 64
"""Limit of nesting in arguments."""


class Gemma4Parser(FramedParser):
    """Finds `<|tool_call>call:F{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`, as Gemma 4 writes it."""

    frames, signs = (("<|tool_call>", "<tool_call|>"),), ("<|tool_call>",)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        name, brace, rest = inside.strip().removeprefix("call:").partition("{")
        if not inside.strip().startswith("call:") or not brace or not is_name(name.strip()):
            return super().read(inside, bare=bare, closed=closed)
        try:
            reader = _GemmaValues(brace + rest)
            values = reader.value()
            return [ToolCall(name.strip(), to_json(values))] if reader.at_end() else []
        except ValueError:
            return []


class _GemmaValues:
    """Reads a value: JSON with keys that are not quoted, and texts between `<|"|>`."""

    _QUOTE = '<|"|>'
    _PLAIN = re.compile(r"[^,:{}\[\]<\"]++")
    _SPACE = re.compile(r"\s*+")

    def __init__(self, text: str):
        self._text, self._place = text, 0

    def at_end(self) -> bool:
        """Whether only white space is left."""
        self._skip_space()
        return self._place == len(self._text)

    def value(self, depth: int = 0) -> Any:
        """The value that begins here. Raises `ValueError` if there is none."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if self._take("{"):
            values = {}
            while not self._take("}"):
                key = self._quoted()
                name = self._plain() if key is None else key
                if not self._take(":"):
                    raise ValueError("a key without a value")
                values[name] = self.value(depth + 1)
                self._separate("}")
            return values
        if self._take("["):
            items = []
            while not self._take("]"):
                items.append(self.value(depth + 1))
                self._separate("]")
            return items
        quoted = self._quoted()
        if quoted is not None:
            return quoted
        word = self._plain()
        value = parsed_json(word)
        return word if value is None and word != "null" else value

    def _separate(self, closing: str) -> None:
        """Go past a comma, if the closing bracket does not come."""
        self._skip_space()
        if not self._take(",") and not self._text.startswith(closing, self._place):
            raise ValueError("no comma between two values")

    def _quoted(self) -> str | None:
        """The text in quotes that begins here; None if none does."""
        self._skip_space()
        if self._take(self._QUOTE):
            end = self._text.find(self._QUOTE, self._place)
            if end < 0:
                raise ValueError("a text without an end")
            text, self._place = self._text[self._place : end], end + len(self._QUOTE)
            return text
        if self._text.startswith('"', self._place):
            end = self._place + 1
            while end < len(self._text) and self._text[end] != '"':
                end += 2 if self._text[end] == "\\" else 1
            value, _ = first_json(self._text[self._place : end + 1])
            if isinstance(value, str):
                self._place = end + 1
                return value
            raise ValueError("a text without an end")
        return None

    def _plain(self) -> str:
        self._skip_space()
        found = self._PLAIN.match(self._text, self._place)
        if found is None:
            raise ValueError("no value")
        self._place = found.end()
        return found[0].strip()

    def _take(self, sign: str) -> bool:
        self._skip_space()
        if not self._text.startswith(sign, self._place):
            return False
        self._place += len(sign)
        return True

    def _skip_space(self) -> None:
        found = self._SPACE.match(self._text, self._place)
        self._place = self._place if found is None else found.end()


class Lfm2Parser(FramedParser):
    """Finds `<|tool_call_start|>[f(x="text", n=3), g()]<|tool_call_end|>`, calls as Python has them.

    LFM2 writes them. Nothing is run: the text is parsed, and arguments have to be literals.
    """

    frames = (("<|tool_call_start|>", "<|tool_call_end|>"),)
    signs = ("<|tool_call_start|>", "<|tool_list_start|>")

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall]:
        """See `FramedParser`."""
        text = inside.strip()
        if len(text) <= MAX_LITERAL:
            # the chat template does not escape line breaks in texts
            for spelled in (text, text.replace("\n", "\\n")):
                try:
                    return _python_calls(spelled)
                except (ValueError, TypeError, SyntaxError, MemoryError):
                    continue
        return super().read(inside, bare=bare, closed=closed)


def _python_calls(text: str) -> list[ToolCall]:
    """The calls in a list. Raises `ValueError` or `SyntaxError` if it has none, or anything else."""
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return [_python_call(node) for node in tree.elts]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if not is_name(name) or any(one.arg is None for one in node.keywords):
        raise ValueError("no call of a function by its name")
    return ToolCall(name, to_json({str(one.arg): _literal(one.value) for one in node.keywords}))


def _literal(node: ast.expr) -> Any:
    """The value of a literal. Raises `ValueError` for what JSON cannot have."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=word) if word.lower() in WORDS:
            return WORDS[word.lower()]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return {str(name): _literal(value) for name, value in zip(names, values, strict=True)}
    raise ValueError("no literal")
