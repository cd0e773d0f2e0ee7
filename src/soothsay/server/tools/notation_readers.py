"""Finds tool calls in notations that are neither JSON nor tags: Gemma 4's and LFM2's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from soothsay.server.tools.framed_parser import FramedParser, is_name, to_json
from soothsay.server.tools.tool_arguments import MAX_LITERAL, WORDS, parsed_json
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
        values = _gemma_value(brace + rest)
        return [] if values is None else [ToolCall(name.strip(), to_json(values))]


_GEMMA_TOKEN = re.compile(
    r"""\s*+(?:
        <\|"\|>(?P<text>.*?)<\|"\|>
        | (?P<json>"(?:[^"\\]|\\.)*+")
        | (?P<sign>[\[\]{}:,])
        | (?P<word>[^,:{}\[\]<"\s][^,:{}\[\]<"]*+)
    )\s*+""",
    re.DOTALL | re.VERBOSE,
)


def _gemma_value(text: str) -> Any:
    """The value of JSON with keys that are not quoted, and with texts between `<|"|>`; None: it is none."""
    parts, depth, place = list[str](), 0, 0
    while place < len(text) and depth <= MAX_DEPTH:
        if (found := _GEMMA_TOKEN.match(text, place)) is None:
            return None
        place, told = found.end(), found[found.lastgroup or ""].strip()
        match found.lastgroup:
            case "sign":
                depth += (told in "{[") - (told in "}]")
                if told in "}]" and parts[-1:] == [","]:
                    parts.pop()
            case "text":
                told = json.dumps(found["text"])
            case "word" if text.startswith(":", place) or (parsed_json(told) is None and told != "null"):
                told = json.dumps(told)
        parts.append(told)
    return parsed_json("".join(parts))


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
