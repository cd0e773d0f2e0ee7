"""What clients send and this server cannot read: parts of messages become texts, other tools are left out.

Clients send the whole conversation each time, so one part that is refused would make all of it unusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from soothsay.chat_messages import text_part
from soothsay.errors import RequestError

THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Parts with thoughts. Where they are beside texts, they are dropped."""

DOCUMENTS = ("document", "search_result")
"""Parts that may have texts inside."""

NAMES = ("name", "tool_name", "title", "filename")
"""Fields that say which image, tool or file a part is about."""

MAX_SHOWN = 64
"""Limit of characters of a type or a name in the text that says what was left out."""


def as_text(part: Any) -> Any:
    """A part of a message as one of type `text`. What is no part comes back as it is.

    The text of a part that cannot be read, such as an image, says what was left out.
    """
    try:
        return text_part(part)
    except RequestError:
        return {"type": "text", "text": _text(part)}


def _text(part: Mapping[str, Any]) -> str:
    kind, text = part["type"], part.get("text")
    if kind in THOUGHTS:
        return ""
    if isinstance(text, str):
        return text
    name = next((value for field in NAMES if isinstance(value := part.get(field), str)), "")
    if kind in DOCUMENTS and (text := _inside(part)):
        return f"{name}\n{text}" if name else text
    shown = " ".join(filter(None, (kind[:MAX_SHOWN], name[:MAX_SHOWN])))
    return f"[{shown} left out: this server reads text]"


def _inside(part: Mapping[str, Any]) -> str:
    """The text of a document or of a result of a search; empty if it has none."""
    source = part.get("source")
    place = source if isinstance(source, Mapping) else part
    content = place.get("data") if place.get("type") == "text" else place.get("content")
    if isinstance(content, str):
        return content
    texts = (
        [one.get("text") for one in content if isinstance(one, Mapping)] if isinstance(content, list) else []
    )
    return "\n".join(text for text in texts if isinstance(text, str))


def without_other_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat without tools that are not functions. The names of new fields report their types.

    A `tool_choice` of such a tool has no effect.
    """
    given, choice = dict(body), body.get("tool_choice")
    tools = body["tools"] if isinstance(body.get("tools"), list) else []
    others = [tool for tool in tools if _is_other(tool)]
    if others:
        given["tools"] = [tool for tool in tools if not _is_other(tool)] or None
        given |= _report("tools", others)
    if not isinstance(choice, Mapping):
        return {**given, "tool_choice": None} if len(others) == len(tools) > 0 else given
    if choice.get("type") == "allowed_tools":
        return {**given, "tool_choice": _allowed(choice)}
    if _is_other(choice):
        return {**given, "tool_choice": None, **_report("tool_choice", [choice])}
    return {**given, "tool_choice": None} if _name(choice) in map(_name, others) else given


def _is_other(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("type"), str) and tool["type"] != "function"


def _report(field: str, tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{field}.{tool['type']}": True for tool in tools}


def _name(tool: Mapping[str, Any]) -> Any:
    """The name of a tool, or that in a choice; the tool itself if it has none."""
    inner = tool.get(str(tool.get("type")))
    return (inner if isinstance(inner, Mapping) else tool).get("name", tool)


def _allowed(choice: Mapping[str, Any]) -> Any:
    """A choice of some tools without those that are not functions; "none" if no tool is left."""
    inner = choice.get("allowed_tools")
    tools = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(tools, list) or not any(map(_is_other, tools)):
        return choice
    kept = [tool for tool in tools if not _is_other(tool)]
    return {**choice, "allowed_tools": {**inner, "tools": kept}} if kept else "none"
