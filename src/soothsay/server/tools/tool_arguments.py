"""Arguments of tool calls: JSON, and texts whose type is in the tool's JSON schema."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from soothsay.server.tools.tool_calls import Tools

MAX_REFERENCES = 16
"""Limit of references (`$ref`) and alternatives that are followed to find the types of one argument."""

MAX_LITERAL = 2**16
"""Limit of characters of a list or dictionary in Python's form."""

WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None, "none": None}
"""Values as models write them. Templates show them as JSON has them, or as Python has them."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
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
    for kind in types - {"string"}:
        if isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)):
            return value if value is not None or stripped.lower() in WORDS else text
    return text


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


def parsed_json(text: str) -> Any:
    """The JSON value that a text is; None if it is not exactly one."""
    value, end = first_json(text)
    return value if end == len(text) else None


def first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of a text, and where it ends; None and 0 if there is none."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _finite(text: str) -> float:
    """A number of JSON, which has no NaN and no infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


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
        found.update(
            kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
        )
        for key in ("anyOf", "oneOf", "allOf"):
            left += part[key] if isinstance(part.get(key), list) else []
        if isinstance(part.get("enum"), list) and "type" not in part:
            found.update(kind for value in part["enum"] for kind in _kinds(value))
        if isinstance(part.get("$ref"), str):
            left.append(_at(schema, part["$ref"]))
    return frozenset(found & {*_TYPES, "string"})


def _kinds(value: Any) -> list[str]:
    if isinstance(value, str):
        return ["string"]
    fitting = [kind for kind, types in _TYPES.items() if isinstance(value, types)]
    return ["boolean"] if isinstance(value, bool) else fitting


def _at(schema: Mapping[str, Any], reference: str) -> Any:
    """What a reference inside of the schema, such as "#/$defs/Place", leads to."""
    part: Any = schema
    for key in reference.removeprefix("#/").split("/")[:MAX_REFERENCES]:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part
