"""The bodies of OpenAI's Responses API, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError

from soothsay.server.generation.body_unions import TEXT_OR_MORE, LenientBody, OtherKind, by_type, refuse
from soothsay.server.generation.reply_format import Json
from soothsay.server.generation.request_bodies import ChatRequest, TextPart, Whole
from soothsay.server.generation.service import make_body
from soothsay.server.http.api_errors import invalid, unsupported
from soothsay.server.http.json_streams import to_line

STATELESS = "this server stores nothing; send the whole conversation as input"

REFUSED = {
    "background": "answers do not run in the background here; use stream",
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


Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("[more]")],
    TEXT_OR_MORE,
]
"""A text, whole or in parts."""


class InputMessage(LenientBody):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(LenientBody):
    """A call of a function in an earlier answer. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class InputCallOutput(LenientBody):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content = ""


class InputReasoning(LenientBody):
    """Thoughts of the model in an earlier answer. Those without a text are dropped."""

    type: Literal["reasoning"]
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        """The thoughts that can be read."""
        texts = [part.get("text") for part in self.content or () if isinstance(part, Mapping)]
        return "".join(text for text in texts if isinstance(text, str))


class OtherItem(LenientBody):
    """An item that is left out."""

    type: str


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
    | Annotated[OtherItem, Tag("[other]")],
    by_type(*ITEMS, missing="message"),
    BeforeValidator(_as_known),
]


class FunctionTool(LenientBody):
    """A function that the model may call. `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # no effect: a forced call always follows the schema

    def chat(self) -> Json:
        """The same tool in a chat."""
        function = self.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", "function": function}


class TextFormat(LenientBody):
    """The form of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None


class TextSettings(LenientBody):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ReasoningSettings(LenientBody):
    """How much the model shall think: a variable of the chat template."""

    effort: str | None = None


class ResponsesRequest(LenientBody):
    """The body of `POST /v1/responses`. Fields that are not listed here are those of chats."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("[more]")],
        TEXT_OR_MORE,
    ]
    instructions: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[FunctionTool, Tag("[function]")] | Annotated[OtherKind, Tag("[other]")],
                    by_type("function"),
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("[text]")] | Annotated[Json, Tag("[more]")],
            TEXT_OR_MORE,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Whole | None = None
    metadata: Json | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise `ApiError` for fields that this server, or this API, does not have."""
        refuse(self.model_extra, REFUSED, RENAMED)

    def chat(self) -> ChatRequest:
        """The chat that this request asks for. Raises `ApiError`."""
        known, choice = (*IGNORED, *REFUSED), self.tool_choice
        others = [item.type for item in self.input if isinstance(item, OtherItem)]
        body = {
            **{name: value for name, value in (self.model_extra or {}).items() if name not in known},
            **{f"input.{kind}": True for kind in others},  # reports them
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.chat() for tool in self.tools or ()] or None,
            "tool_choice": _chat_choice(choice) if isinstance(choice, dict) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": self._response_format(),
            "logprobs": self.with_logprobs or None,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
        }
        chat = make_body(ChatRequest, body)
        if getattr(chat.speculation, "trace", None):
            message = "traces are part of streams of chats only; use /v1/chat/completions"
            raise unsupported("speculation.trace", message)
        return chat

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
                    messages.append({"role": item.role, "content": _joined(item.content), **own})
                    thoughts = {}
                case InputCall():
                    if thoughts or not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": "", **thoughts})
                        thoughts = {}
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
                case InputCallOutput():
                    output = _joined(item.output)
                    messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        return messages

    def _response_format(self) -> Json | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        schema = {"name": form.name, "description": form.description, "schema": form.schema_}
        return {"type": form.type, "json_schema": schema}

    def echo(self) -> Json:
        """The fields that the reply repeats. Raises `ApiError` if they are too large."""
        choice = self.tool_choice or "auto"
        if isinstance(choice, dict) and choice.get("type") not in ("function", "allowed_tools"):
            choice = "auto"  # it has no effect
        form = self.text.format if self.text is not None else None
        told = {
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
            },
            "tool_choice": choice,
            "top_logprobs": self.top_logprobs or 0,
            "user": self.user,
        }
        if (size := len(to_line(told))) > MAX_ECHO:
            message = f"metadata, text and user have {size} characters; the reply repeats at most {MAX_ECHO}"
            raise invalid("metadata", message)
        tools = [tool.model_dump() for tool in self.tools or () if isinstance(tool, FunctionTool)]
        return {**told, "instructions": self.instructions, "tools": tools}  # both are in the prompt too


def _chat_choice(choice: Json) -> Json:
    """A choice of tools as chats have it. `ChatRequest` checks it."""
    kind, tools = choice.get("type"), choice.get("tools")
    if kind == "function":
        return {"type": kind, "function": {"name": choice.get("name")}}
    if kind == "allowed_tools" and isinstance(tools, list):
        named = [_chat_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _joined(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
