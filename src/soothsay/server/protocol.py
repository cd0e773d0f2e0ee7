"""The bodies of requests. Unknown fields are refused, except those in `IGNORED`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from soothsay.server.safe_json import JsonError, read_json

T = TypeVar("T")

MAX_FIELDS = 2048
"""Limit of fields of one object. Each wrong one makes an error, of which the client gets the first."""

MAX_CHOICES = 16_384
"""Limit of texts that an answer may have to be one of. As a grammar, more would be too large."""

IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of OpenAI's API that have no effect here. They concern its accounting, storage and speed."""


def _limited(data: Any) -> Any:
    """Refuse an object with too many fields before its fields are checked."""
    if isinstance(data, Mapping) and len(data) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"an object must not have more than {MAX_FIELDS} fields")
    return data


Items = Annotated[list[T], Field(fail_fast=True)]
"""A list. Its first wrong item ends validation: thousands of errors would take gigabytes."""

Fields = Annotated[dict[str, T], BeforeValidator(_limited)]
"""An object whose fields may have any name."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        return _limited(data)


Choices = Annotated[Items[str], Field(max_length=MAX_CHOICES)]


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False


class Speculation(_Body):
    """How to speculate: drafter, verifier, limit of draft tokens, and whether to report each step."""

    drafter: str | None = None
    verifier: str | None = None
    max_nodes: int | None = Field(default=None, ge=0)
    trace: bool | None = None


class StructuredOutputs(_Body):
    """vLLM's field for a form that the answer must have. Only one of its fields may be set."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class GenerationRequest(_Body):
    """The fields that chats and completions share. None always means the default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Fields[float] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    speculation: Speculation | bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if name not in IGNORED}

    @property
    def wants_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(_Body):
    """A part of a message. Images and sound are not supported."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function of a call. `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class Call(_Body):
    """A call in an earlier message of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # clients send back the messages that they got

    @property
    def size(self) -> int:
        """Number of characters of its content and of its calls."""
        parts = self.content if isinstance(self.content, list) else []
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in parts]
        return sum(map(len, (*texts, *(call.function.arguments for call in self.tool_calls or ()))))

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one text, arguments are a mapping."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _parsed(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


class Function(_Body):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    """Names one of the functions."""

    name: str


class NamedTool(_Body):
    """Names the tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Body):
    """A JSON schema, with the name that OpenAI requires."""

    name: str
    description: str | None = None
    strict: bool | None = None  # no effect: answers always follow the schema
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Body):
    """The form of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Fields[str | int | float | bool] | None = None
    modalities: Items[Literal["text"]] | None = None


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(_Body):
    """The body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Items[int]


def _parsed(arguments: str) -> Any:
    """JSON text as a value, or the text itself if it is not JSON, or nested too deep."""
    try:
        return read_json(arguments.encode())
    except JsonError:
        return arguments  # an earlier answer of a model
