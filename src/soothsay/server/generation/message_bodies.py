"""Messages of chats, their parts, and tools, as bodies have them.

Parts that this server cannot read become texts, and other tools are left out. Clients send the whole
conversation each time, so one part that is refused would make all of it unusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from soothsay.chat_layout import Role, text_part
from soothsay.errors import RequestError
from soothsay.server.http.bodies import Body, Items, Json
from soothsay.server.http.json_streams import to_line
from soothsay.server.http.safe_json import JsonError, read_json

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
    parts = content if isinstance(content, list) else []
    texts = [one.get("text") for one in parts if isinstance(one, Mapping)]
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


class TextPart(Body):
    """A part of a message. `as_text` says what becomes of images, sound and other parts."""

    type: Literal["text"]
    text: str

    _as_text = model_validator(mode="before")(as_text)


def joined_text(content: str | Sequence[TextPart], separator: str = "") -> str:
    """A text, or the texts of its parts."""
    return content if isinstance(content, str) else separator.join(part.text for part in content)


def call_of(number: str, name: str, arguments: Any) -> Json:
    """A call of a function in an earlier message, as chats have it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_of(name: str, description: str | None, parameters: Json | None) -> Json:
    """A function that the model may call, as chats have it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class CalledFunction(Body):
    """The function of a call. `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class Call(Body):
    """A call in an earlier message of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, data: Any) -> Any:
        """A call of a tool that is not a function, with its input as an argument."""
        kind = data.get("type") if isinstance(data, Mapping) else None
        called = data.get(kind) if isinstance(kind, str) else None
        if kind == "function" or not isinstance(called, Mapping):
            return data
        arguments = to_line({name: value for name, value in called.items() if name != "name"})
        return {"id": data.get("id"), "function": {"name": called.get("name"), "arguments": arguments}}


class ChatMessage(Body):
    """One message of a conversation. Clients send back messages that they got, with fields of all kinds."""

    role: Role
    content: Items[TextPart] | str | None = None  # errors name the part, since lists are tried first
    name: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # for templates that show earlier reasoning
    reasoning: str | None = None  # the same by another name

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one text, arguments are a mapping."""
        role = "system" if self.role == "developer" else self.role
        message: Json = {"role": role, "content": joined_text(self.content or "")}
        if self.tool_calls:
            message["tool_calls"] = [
                call_of(call.id, call.function.name, _parsed(call.function.arguments))
                for call in self.tool_calls
            ]
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""The name of a tool, of the length that the APIs of OpenAI and Anthropic allow between them."""


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # forced calls always follow it, as `strict` asks


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """Names one of the functions."""

    name: str


class NamedTool(Body):
    """Names the tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction

    forced: ClassVar = True

    @property
    def named(self) -> Sequence[NamedTool]:
        """The tools that may be called."""
        return [self]


class ToolSubset(Body):
    """Some of the tools, by name, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Body):
    """Names the tools that the model may or must call."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset

    @property
    def named(self) -> Sequence[NamedTool]:
        """The tools that may be called."""
        return self.allowed_tools.tools

    @property
    def forced(self) -> bool:
        """Whether one of them must be called."""
        return self.allowed_tools.mode == "required"


class OtherKind(Body):
    """A tool that is not a function, or an item of a conversation that is none. Chats leave it out."""

    model_config = ConfigDict(extra="allow")

    type: str

    def chat(self) -> dict[str, Any]:
        """The same in a chat."""
        return self.model_dump()


def _parsed(arguments: str) -> Any:
    """JSON text as a value, or the text itself if it is not JSON, or nested too deep."""
    try:
        return read_json(arguments.encode())
    except JsonError:
        return arguments  # an earlier answer of a model
