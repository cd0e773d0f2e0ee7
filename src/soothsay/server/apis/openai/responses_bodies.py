"""The bodies of OpenAI's Responses API, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError

from soothsay.server.generation.message_bodies import OtherKind, TextPart, call_of, joined_text, tool_of
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import further_fields
from soothsay.server.http.api_errors import invalid
from soothsay.server.http.bodies import Body, Items, Json, TextOr, Whole, by_type, make_body
from soothsay.server.http.json_streams import to_line

STATELESS = "this server stores nothing; send the whole conversation as input"

REFUSED = {
    "background": "answers do not run in the background here; leave it out, and the reply has the answer",
    "conversation": STATELESS,
    "previous_response_id": STATELESS,
    "prompt": "this server stores no prompts; send the text as input",
}
"""Fields that would change the answer and cannot be served, and what to do instead."""

MAX_ECHO = 1 << 18
"""Limit of characters of a request that its reply repeats, besides the prompt. They are kept meanwhile."""

IGNORED = ("context_management", "max_tool_calls", "stream_options", "truncation")
"""Fields that have no effect here, besides those that chats ignore. They concern tools that the server would
run, and padding of streams. A prompt is never truncated."""

RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "n": "",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Fields of chats that this API has under another name, or not at all."""


SAME = {"model", "stream", "temperature", "top_p", "parallel_tool_calls"}
"""Fields that chats have too, with the same meaning."""

Content = TextOr[Items[TextPart]]
"""A text, whole or in parts."""


class InputMessage(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Body):
    """A call of a function in an earlier answer. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class InputCallOutput(Body):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content = ""


class InputReasoning(Body):
    """Thoughts of the model in an earlier answer. Those without a text are dropped."""

    type: Literal["reasoning"]
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        """The thoughts that can be read."""
        texts = [part.get("text") for part in self.content or () if isinstance(part, Mapping)]
        return "".join(text for text in texts if isinstance(text, str))


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
"""Types of the items of a conversation."""


def _as_known(item: Any) -> Any:
    """An item of the conversation. Calls of tools that are not functions, and their results, become those of
    functions: `custom_tool_call`, `local_shell_call_output` and others."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    if not isinstance(kind, str) or kind in ITEMS:
        return item
    if kind == "item_reference":
        raise PydanticCustomError("unsupported", "items of type item_reference: " + STATELESS)
    number = item.get("call_id", item.get("id"))
    if kind.endswith("_call_output"):
        output = item.get("output")
        text = output if isinstance(output, str | list) else to_line(output)
        return {"type": "function_call_output", "call_id": number, "output": text}
    if kind.endswith("_call") and "call_id" in item:
        told = ("type", "id", "call_id", "status", "name")
        name = item.get("name", kind.removesuffix("_call"))
        arguments = to_line({field: value for field, value in item.items() if field not in told})
        return {"type": "function_call", "call_id": number, "name": name, "arguments": arguments}
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")]
    | Annotated[InputReasoning, Tag("[reasoning]")]
    | Annotated[OtherKind, Tag("[other]")],
    by_type(*ITEMS, missing="message"),
    BeforeValidator(_as_known),
]


class FunctionTool(Body):
    """A function that the model may call. `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # no effect: a forced call always follows the schema

    def chat(self) -> Json:
        """The same tool in a chat."""
        return tool_of(self.name, self.description, self.parameters)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[OtherKind, Tag("[other]")], by_type("function")
]


class TextFormat(Body):
    """The form of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None


class TextSettings(Body):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ReasoningSettings(Body):
    """How much the model shall think: a variable of the chat template."""

    effort: str | None = None


class ResponsesRequest(Body):
    """The body of `POST /v1/responses`. Fields that are not listed here are those of chats."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: TextOr[Annotated[Items[InputItem], Field(min_length=1)]]
    instructions: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: TextOr[Json] | None = None
    parallel_tool_calls: bool | None = None
    include: Items[str] | None = None
    top_logprobs: Whole | None = None
    metadata: Json | None = None
    user: str | None = None

    def chat(self) -> ChatRequest:
        """The chat that this request asks for. Raises `ApiError`."""
        extra = further_fields(self.model_extra, REFUSED, RENAMED, IGNORED)
        others = [item.type for item in self.input if isinstance(item, OtherKind)]
        body = {
            **extra,
            **{f"input.{kind}": True for kind in others},  # reports them
            **self.model_dump(include=SAME),
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.chat() for tool in self.tools or ()] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": self._response_format(),
            "logprobs": self.with_logprobs or None,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
        }
        return make_body(ChatRequest, body)

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer shall have log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    def _messages(self) -> list[Json]:
        """The conversation. Calls belong to the model's message before them, thoughts to the one after."""
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thoughts: Json = {}
        for item in self.input:
            match item:
                case InputReasoning():
                    thoughts = {"reasoning_content": item.text} if item.text else {}
                case InputMessage():
                    own = thoughts if item.role == "assistant" else {}
                    messages.append({"role": item.role, "content": joined_text(item.content), **own})
                    thoughts = {}
                case InputCall():
                    if thoughts or not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": "", **thoughts})
                        thoughts = {}
                    call = call_of(item.call_id, item.name, item.arguments)
                    messages[-1].setdefault("tool_calls", []).append(call)
                case InputCallOutput():
                    output = joined_text(item.output)
                    messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        return messages

    @property
    def _form(self) -> TextFormat:
        """The form of the answer."""
        return (self.text or TextSettings()).format or TextFormat(type="text")

    def _response_format(self) -> Json:
        form = self._form
        schema = {"name": form.name, "description": form.description, "schema": form.schema_}
        return {"type": form.type, **({"json_schema": schema} if form.type == "json_schema" else {})}

    def echo(self) -> Json:
        """The fields that the reply repeats. Raises `ApiError` if they are too large."""
        choice = self.tool_choice or "auto"
        if isinstance(choice, dict) and choice.get("type") not in ("function", "allowed_tools"):
            choice = "auto"  # it has no effect
        shown = self._form.model_dump(by_alias=True, exclude_none=True)
        told = {
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": shown},
            "tool_choice": choice,
            "top_logprobs": self.top_logprobs or 0,
            "user": self.user,
        }
        if (size := len(to_line(told))) > MAX_ECHO:
            message = f"metadata, text and user have {size} characters; the reply repeats at most {MAX_ECHO}"
            raise invalid("metadata", message)
        tools = [tool.model_dump() for tool in self.tools or () if isinstance(tool, FunctionTool)]
        return {**told, "instructions": self.instructions, "tools": tools}  # both are in the prompt too


def _chat_choice(choice: str | Json | None) -> str | Json | None:
    """A choice of tools as chats have it. `ChatRequest` checks it."""
    if not isinstance(choice, dict):
        return choice
    kind, tools = choice.get("type"), choice.get("tools")
    if kind == "function":
        return {"type": kind, "function": {"name": choice.get("name")}}
    if kind == "allowed_tools" and isinstance(tools, list):
        named = [*map(_chat_choice, tools)]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice
