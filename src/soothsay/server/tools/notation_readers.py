"""Finds tool calls whose arguments are not JSON: texts in tags, and the notations of Gemma 4 and LFM2.

A text gets the type that the tool's JSON schema has for the argument.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from soothsay.server.tools.tool_calls import (
    CLOSE,
    NAME,
    ON_LINES,
    OPEN,
    FramedParser,
    ToolCall,
    Tools,
    is_name,
    parsed_json,
    to_json,
)

MAX_REFERENCES = 16
"""Limit of references (`$ref`) and alternatives that are followed to find the types of one argument."""

MAX_LITERAL = 2**16
"""Limit of characters of a list or dictionary in Python's form."""

WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None, "none": None}
"""Values as models write them. Templates show them as JSON has them, or as Python has them."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
}


def schema_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; empty if there is no such tool, or it has none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument that a model has written as text.

    Args:
        text: the value: strings as they are, other values in JSON.
        name: of the argument.
        schema: of all arguments.

    Returns:
        A value of the type in the schema if the text is one, else the text.
    """
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(own, schema)
    if types <= {"string"}:
        return text
    stripped = text.strip()
    value = WORDS[stripped.lower()] if stripped.lower() in WORDS else parsed_json(stripped)
    if value is None and not types.isdisjoint({"array", "object"}):
        value = _literal(stripped)
    if isinstance(value, float) and value.is_integer() and types.isdisjoint({"number"}):
        value = int(value)
    fits = not types.isdisjoint(_kinds(value) - {"string"})
    return value if fits and (value is not None or stripped.lower() in WORDS) else text


def _literal(text: str) -> Any:
    """The list or dictionary that a text is in Python, as some templates show them; None if it is none."""
    if len(text) > MAX_LITERAL or not text.startswith(("[", "{")):
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value


def _types(own: Any, schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that an argument may have, as far as its schema says so."""
    found, left = set[str](), [own]
    for _ in range(MAX_REFERENCES):
        if not left:
            break
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        kinds = part.get("type")
        found |= {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
        for key in ("anyOf", "oneOf", "allOf"):
            left += part[key] if isinstance(part.get(key), list) else []
        if isinstance(part.get("enum"), list) and "type" not in part:
            found.update(kind for value in part["enum"] for kind in _kinds(value))
        if isinstance(part.get("$ref"), str):
            left.append(_at(schema, part["$ref"]))
    return frozenset(found & {*_TYPES})


def _kinds(value: Any) -> set[str]:
    """The JSON types of a value. A whole number has two."""
    fitting = {kind for kind, types in _TYPES.items() if isinstance(value, types)}
    return {"boolean"} if isinstance(value, bool) else fitting


def _at(schema: Mapping[str, Any], reference: str) -> Any:
    """What a reference inside of the schema, such as "#/$defs/Place", leads to."""
    part: Any = schema
    for key in reference.removeprefix("#/").split("/")[:MAX_REFERENCES]:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


class TextsParser(FramedParser):
    """Finds calls whose arguments are texts in tags. They get the types of the tool's schema."""

    call: ClassVar[re.Pattern[str]]
    """A call inside of the tags of `frames`: its name, and its arguments."""

    argument: ClassVar[re.Pattern[str]]
    """One argument: its name, and its value."""

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        calls = []
        for name, arguments in _all_matches(self.call, inside) or ():
            if (pairs := _all_matches(self.argument, arguments)) is None:
                return []
            schema = schema_of(self._tools, name)
            values = {key.strip(): typed(text, key.strip(), schema) for key, text in pairs}
            calls.append(ToolCall(name, to_json(values)))
        return calls or None


class QwenCoderParser(TextsParser):
    """Finds calls of the form `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with line breaks around names and values. The first tag is
    sometimes missing.
    """

    frames, trailer = ((OPEN, CLOSE), ("<function=", "</function>")), CLOSE
    signs: ClassVar[Sequence[str]] = ("<parameter=",)
    forced: ClassVar[tuple[str, str] | None] = ON_LINES
    call = re.compile(rf"\s*<function=({NAME})>(.*)</function>", re.DOTALL)
    argument = re.compile(r"\s*<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        if not bare:
            return super().read(inside, bare=bare, closed=closed)
        whole = f"<function={inside}</function>"
        return (super().read(whole, bare=bare, closed=closed) if closed else None) or []


class SeedParser(QwenCoderParser):
    """Finds calls as Qwen3-Coder's in other tags. Seed-OSS writes them."""

    frames = (("<seed:tool_call>", "</seed:tool_call>"), ("<function=", "</function>"))
    trailer = "</seed:tool_call>"
    signs, forced = (trailer,), None


class GlmParser(TextsParser):
    """Finds calls of the form `<tool_call>F<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`.

    GLM 4.5 and later write them. A call without arguments names one of the request's tools.
    """

    frames, signs, forced = ((OPEN, CLOSE),), ("<arg_key>",), ON_LINES
    call = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
    argument = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        names = {tool["function"]["name"] for tool in self._tools}
        known = "<arg_key>" in inside or inside.strip() in names
        return super().read(inside, bare=bare, closed=closed) if closed and known else None


class MiniMaxParser(TextsParser):
    """Finds `<minimax:tool_call><invoke name="F"><parameter name="P">value</parameter></invoke>...`.

    MiniMax M2 writes them. One pair of outer tags may have several calls.
    """

    frames, signs = (("<minimax:tool_call>", "</minimax:tool_call>"),), ("<minimax:tool_call>",)
    call = re.compile(rf'\s*<invoke name="?({NAME})"?>(.*?)</invoke>', re.DOTALL)
    argument = re.compile(r'\s*<parameter name="?([^<>"\n]*)"?>\n?(.*?)\n?</parameter>', re.DOTALL)


def _all_matches(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """The two groups of matches that follow each other; None if a text has anything but such matches."""
    groups, place = [], 0
    while (found := pattern.match(text, place)) is not None:
        groups.append((found[1], found[2]))
        place = found.end()
    return None if text[place:].strip() else groups


MAX_DEPTH = 64
"""Limit of nesting in arguments."""


class Gemma4Parser(FramedParser):
    """Finds `<|tool_call>call:F{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`, as Gemma 4 writes it."""

    frames, signs = (("<|tool_call>", "<tool_call|>"),), ("<|tool_call>",)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        name, brace, rest = inside.strip().removeprefix("call:").partition("{")
        if not inside.strip().startswith("call:") or not brace or not is_name(name.strip()):
            return None
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

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        text = inside.strip()
        if len(text) <= MAX_LITERAL:
            # the chat template does not escape line breaks in texts
            for spelled in (text, text.replace("\n", "\\n")):
                try:
                    return _python_calls(spelled)
                except (ValueError, TypeError, SyntaxError, MemoryError):
                    continue
        return None


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
    return ToolCall(name, to_json({str(one.arg): _python_value(one.value) for one in node.keywords}))


class _Words(ast.NodeTransformer):
    """Replaces the names of JSON's values by these. Raises `ValueError` for keys that are no texts."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id.lower()]) if node.id.lower() in WORDS else node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key that is no text")
        return self.generic_visit(node)


def _python_value(node: ast.expr) -> Any:
    """The value of a literal. Raises `ValueError` or `TypeError` for what JSON cannot have."""
    return ast.literal_eval(_Words().visit(node))
