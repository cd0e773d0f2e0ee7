"""The bodies of Anthropic's Messages API, and the chats that they ask for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Tag

from soothsay.server.generation.message_bodies import (
    OtherKind,
    TextPart,
    ToolName,
    call_of,
    joined_text,
    tool_of,
)
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import further_fields
from soothsay.server.http.api_errors import ApiError, invalid
from soothsay.server.http.bodies import Body, Items, Json, TextOr, Whole, by_type, make_body
from soothsay.server.http.json_streams import to_line

REFUSED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no other servers; give their tools as tools",
}
"""Fields that would change the answer and cannot be served, and what to do instead."""

IGNORED = (
    *("betas", "cache_control", "context_management", "diagnostics", "inference_geo"),
    *("service_tier", "speed", "user_profile_id", "workspace_id"),
)
"""Fields that have no effect here. They concern caching, accounting and speed."""

RENAMED = {
    "max_completion_tokens": "max_tokens",
    "n": "",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "logprobs": "",
    "top_logprobs": "",
    "prompt_logprobs": "",
    "continue_final_message": "",
    "add_generation_prompt": "",
}
"""Fields of chats that this API has under another name, or not at all."""


class ThinkingBlock(Body):
    """Thoughts of the model in an earlier answer. The signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Thoughts that cannot be read. They are dropped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Json, Field(default_factory=dict)]


Texts = TextOr[Items[TextPart]]
"""A text, whole or in blocks."""


class ToolResultBlock(Body):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""


Block = Annotated[
    Annotated[TextPart, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    by_type("thinking", "redacted_thinking", "tool_use", "tool_result", other="text"),
]
"""A block of a message. Blocks of other types become texts."""


class AnthropicMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Items[Block]]

    def chat(self) -> list[Json]:
        """The messages of a chat that say the same: one for each result of a tool, and one for the rest.

        Results come first. They answer the calls of the message before.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        texts, thoughts, calls, results = list[str](), list[str](), list[Json](), list[Json]()
        for block in self.content:
            match block:
                case TextPart():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    calls.append(call_of(block.id, block.name, to_line(block.input)))
                case ToolResultBlock():
                    content = joined(block.content)
                    results.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
        message: Json = {"role": self.role, "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [*results, message] if texts or thoughts or calls or not results else results


class AnthropicTool(Body):
    """A tool that the model may call. `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Json

    def chat(self) -> Json:
        """The same tool in a chat."""
        return tool_of(self.name, self.description, self.input_schema)


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("[custom]")] | Annotated[OtherKind, Tag("[other]")],
    by_type("custom", missing="custom"),
]


class AnthropicToolChoice(Body):
    """Whether the model may or must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def chat(self) -> str | Json:
        """The same choice in a chat. Raises `ApiError`."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            message = "tool_choice of type tool needs the name of a tool"
            raise ApiError(400, message, "missing_required_parameter", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Body):
    """Whether the model shall think, where its chat template has a switch for that."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(Body):
    """The form of an answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Body):
    """How much the model shall think, and the form of its answer."""

    effort: str | None = None
    format: JsonFormat | None = None


class RequestMetadata(Body):
    """Whose request it is."""

    user_id: str | None = None


class PromptRequest(Body):
    """The fields that decide the prompt. It is the body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1)]
    system: Texts | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self, *, able: bool) -> ChatRequest:
        """The chat that this request asks for. `able`: the model has thoughts. Raises `ApiError`."""
        return make_body(ChatRequest, self.fields(able=able))

    def fields(self, *, able: bool) -> Json:
        """The fields of that chat. Raises `ApiError`."""
        extra = further_fields(self.model_extra, REFUSED, RENAMED, IGNORED)
        output, choice = self.output_config or OutputConfig(), self.tool_choice
        form = None if output.format is None else {"schema": output.format.schema_}
        return {
            **extra,
            "model": self.model,
            "messages": self._messages(),
            **({"continue_final_message": True, "add_generation_prompt": False} if self.is_begun else {}),
            "tools": [tool.chat() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": None if form is None else {"type": "json_schema", "json_schema": form},
            **self._thinking(extra, able=able),
        }

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    def _messages(self) -> list[Json]:
        system = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        messages = [*system, *(part for message in self.messages for part in message.chat())]
        last = f"messages.{len(self.messages) - 1}"
        if self.is_begun and "tool_calls" in messages[-1]:
            message = "the last message calls a tool; send the tool_result in a message of the user"
            raise invalid(last, message)
        if self.is_begun and not messages[-1]["content"].strip():
            message = "the last message is the beginning of the answer, and it is empty; leave it out"
            raise invalid(last, message)
        return messages

    def _thinking(self, extra: Json, *, able: bool) -> Json:
        """The variables of the chat template that turn thoughts on or off, or say how many."""
        if not able:
            return {}
        fields: Json = {"reasoning_effort": self.output_config.effort if self.output_config else None}
        if self.thinking is not None:
            switch = dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
            given = extra.get("chat_template_kwargs")
            fields["chat_template_kwargs"] = {**switch, **given} if isinstance(given, dict) else switch
        return fields


class AnthropicRequest(PromptRequest):
    """The body of `POST /v1/messages`. Fields that are not listed here are those of chats."""

    max_tokens: Annotated[Whole, Field(ge=0)]
    stream: bool | None = None
    stop_sequences: Items[str] | None = None
    metadata: RequestMetadata | None = None

    def fields(self, *, able: bool) -> Json:
        """The fields of the chat that this request asks for. Raises `ApiError`."""
        fields = super().fields(able=able)
        if self.metadata is not None and self.metadata.user_id is not None:
            fields["user"] = self.metadata.user_id
        stops = self.stop_sequences or None
        return {**fields, "max_tokens": self.max_tokens, "stream": self.stream, "stop": stops}


def joined(content: str | list[TextPart]) -> str:
    """A text, or the texts of blocks, one a line."""
    return joined_text(content, "\n")
