"""Messages of chats, their parts, and tools, as bodies have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from soothsay.server.generation.left_out import as_text
from soothsay.server.http.body_types import Body, Items, Json
from soothsay.server.http.json_streams import to_line
from soothsay.server.http.safe_json import JsonError, read_json


class TextPart(Body):
    """A part of a message. `left_out.py` says what becomes of images, sound and other parts."""

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

    role: Literal["system", "developer", "user", "assistant", "tool"]
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
