"""Messages of a conversation: the forms in which they are given, and the one that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from soothsay.errors import RequestError
from soothsay.tokenizer import Message

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a message that are text, and the field that has it."""

EXPECTED = "give messages such as {'role': 'user', 'content': 'Hello!'}, or text for one of a user"


def text_part(part: Any) -> Any:
    """A part of a message as `{"type": "text", "text": ...}`. What is no part comes back as it is.

    Raises `RequestError` for a part that is not text, such as an image.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    if kind not in TEXT_PARTS:
        raise RequestError(f"{kind[:40]} parts are not supported: this model reads text")
    return {"type": "text", "text": part.get(TEXT_PARTS[kind])}


def conversation(messages: object) -> list[Message]:
    """Messages as chat templates read them. A text is one message of a user.

    The content of a message may be a text or a list of text parts, and arguments of calls may be JSON text,
    as in OpenAI's API. The role `developer` is `system`, as in the server.

    Raises `TypeError` for what is no message, and `RequestError` if there are none, or one has no role or a
    part that is not text.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping | bytes):
        raise TypeError(f"messages must be a list, not a {type(messages).__name__}: {EXPECTED}")
    given = list(messages)
    if not given:
        raise RequestError(f"a conversation needs at least one message: {EXPECTED}")
    return [_for_template(message, f"message {number}") for number, message in enumerate(given, start=1)]


def _for_template(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place} is a {type(message).__name__}: {EXPECTED}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place} has no role: {EXPECTED}")
    changed: dict[str, Any] = {"role": "system"} if message["role"] == "developer" else {}
    content = message.get("content")
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_call(call) for call in calls]
    if isinstance(content, list | tuple):
        changed["content"] = "".join(_text(part, place) for part in content)
    elif not isinstance(content, str | None):
        raise TypeError(f"the content of {place} is a {type(content).__name__}: give text, or text parts")
    return {**message, **changed}


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as a value, if they are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # an earlier answer of a model
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text(part: Any, place: str) -> str:
    try:
        text = text_part(part)["text"]
    except (TypeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise TypeError(f"{place} has {part!r:.60}, which is no part: give {{'type': 'text', 'text': ...}}")
    return text
