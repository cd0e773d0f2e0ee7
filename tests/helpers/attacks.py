"""Bodies that once harmed the server or others, each with the path that it is sent to."""

from __future__ import annotations

import json
from typing import Any

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

HI = [{"role": "user", "content": "Hi"}]


def _chain(count: int) -> dict[str, Any]:
    """A schema in which each of `count` definitions refers to the next."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _nested(word: str, count: int) -> str:
    """JSON text of a schema with `count` schemas in each other."""
    return f'{{"{word}": [' * count + '{"type": "string"}' + "]}" * count


def _lark(count: int) -> str:
    """A grammar of `count` rules, each of which needs the next."""
    rules = [f'r{i}: "(" r{i + 1} ")"' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "a"'])


def _bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    chat = {"model": "sibyl", "messages": HI, "max_tokens": 8}
    text = {"model": "sibyl", "prompt": "Hi", "max_tokens": 8}
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(8000)}}
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    sampled = {"temperature": 1.0, "speculation": {"verifier": "rejection"}}
    return {
        "a chain of definitions": (CHATS, {**chat, "guided_json": _chain(1200)}),
        "a chain of references": (
            CHATS,
            {**chat, "guided_json": {"$defs": {**references, "d5000": {}}, "$ref": "#/$defs/d0"}},
        ),
        "schemas in schemas": (CHATS, {**chat, "guided_json": _nested("allOf", 4000)}),
        "a chain of rules": (CHATS, {**chat, "guided_grammar": _lark(3000)}),
        "a line that is no rule": (CHATS, {**chat, "guided_grammar": "a" * 250_000}),
        "a name of a drafter far too long": (CHATS, {**chat, "speculation": {"drafter": "a " * 2_000_000}}),
        "thousands of properties": (CHATS, {**chat, "guided_json": wide}),
        "a penalty beyond all": (COMPLETIONS, {**text, **sampled, "presence_penalty": 1e308}),
        "a penalty below all": (COMPLETIONS, {**text, **sampled, "frequency_penalty": -1e308}),
        "a bias beyond all": (COMPLETIONS, {**text, **sampled, "logit_bias": {"1": 1e39}}),
        "a prompt of objects": (COMPLETIONS, {**text, "prompt": [{}] * 1_000_000}),
        "a text far too long": (COMPLETIONS, {**text, "prompt": "never ending " * 300_000}),
        "the most urgent of all": (COMPLETIONS, {**text, "priority": -(2**31)}),
        "a token that does not exist": (COMPLETIONS, {**text, "prompt": [-1], "echo": True}),
        "no messages": ("/tokenize", {"messages": []}),
        "arguments in arguments": (
            CHATS,
            {**chat, "messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        ),
    }


ATTACKS = {name: (path, json.dumps(body).encode()) for name, (path, body) in _bodies().items()}
"""By what they are: the path, and the body."""
