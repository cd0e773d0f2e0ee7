"""The bodies of Ollama's API, and the chats and completions that they ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from soothsay.server.generation.message_bodies import Function, call_of
from soothsay.server.generation.request_bodies import UNLIMITED, ChatRequest, CompletionRequest
from soothsay.server.generation.request_parameters import nearest
from soothsay.server.http.api_errors import unsupported
from soothsay.server.http.bodies import Body, Items, Json, Whole, make_body
from soothsay.server.http.json_streams import to_line
from soothsay.server.server_config import ServerConfig

Truncated = Annotated[int, BeforeValidator(lambda value: int(value) if isinstance(value, float) else value)]
"""A number whose fraction is dropped, as Ollama does with options."""


class OllamaOptions(Body):
    """How to sample. What is not given has this server's default."""

    temperature: float | None = None
    top_k: Truncated | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Truncated | None = None
    num_predict: Truncated | None = Field(default=None, serialization_alias="max_tokens")
    stop: str | Items[str] | None = None
    repeat_penalty: float | None = Field(default=None, serialization_alias="repetition_penalty")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def fields(self, config: ServerConfig) -> Json:
        """The fields of a chat or a completion that mean the same. Negative numbers mean "no limit"."""
        given = self.model_dump(by_alias=True)
        for name, least in (("seed", 0), ("max_tokens", 1)):
            if given[name] is not None and given[name] < least:
                given[name] = None
        return nearest(given, config)


class OllamaRequest(Body):
    """The fields that chats and generations share."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Json | Literal["", "json"] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None

    def fields(self, config: ServerConfig) -> Json:
        """The fields of a chat or a completion that mean the same."""
        form: Json | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        return {
            **(self.options or OllamaOptions()).fields(config),
            "model": self.model,
            "stream": self.stream is not False,
            "response_format": form,
        }

    def thinking(self, *, able: bool) -> Json:
        """The fields of a chat that turn thoughts on or off, or say how many. `able`: the model has thoughts.

        Raises `ApiError` if it has none and shall think.
        """
        if self.think and not able:
            raise unsupported("think", f"{self.model!r} does not support thinking")
        if self.think is None or not able:
            return {}
        variables = dict.fromkeys(("enable_thinking", "thinking"), bool(self.think))
        effort = self.think if isinstance(self.think, str) else None
        return {"chat_template_kwargs": variables, "reasoning_effort": effort}

    def chat_of(
        self, config: ServerConfig, messages: list[Json], *, tools: list[Json] | None = None, able: bool
    ) -> ChatRequest:
        """The chat of some messages that this request asks for. `able`: see `thinking`. Raises `ApiError`."""
        asked = {"logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        fields = {**self.fields(config), **asked, **self.thinking(able=able)}
        return make_body(ChatRequest, {**fields, "messages": messages, "tools": tools})


class OllamaFunctionCall(Body):
    """The function of a call, with its arguments as an object."""

    name: str
    arguments: Annotated[Json, Field(default_factory=dict)]


class OllamaCall(Body):
    """A call in an earlier message of the model."""

    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Body):
    """One message of a conversation."""

    role: str
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    thinking: str | None = Field(default=None, serialization_alias="reasoning_content")
    tool_name: str | None = Field(default=None, serialization_alias="name")
    tool_call_id: str | None = None

    def fields(self, number: int) -> Json:
        """The message of a chat. `number` tells apart the calls of messages. Raises `ApiError`."""
        _refuse_images(self.images)
        others = {"content", "images", "tool_calls"}
        message = self.model_dump(by_alias=True, exclude_none=True, exclude=others)
        if self.tool_calls:
            calls = [(f"call_{number}_{place}", call) for place, call in enumerate(self.tool_calls)]
            message["tool_calls"] = [
                call_of(call.id or made, call.function.name, to_line(call.function.arguments))
                for made, call in calls
            ]
        return {**message, "content": self.content or ""}


class OllamaTool(Body):
    """A tool that the model may call."""

    function: Function


class OllamaChatRequest(OllamaRequest):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, default_factory=list)]
    tools: Items[OllamaTool] | None = None

    def chat(self, config: ServerConfig, *, able: bool) -> ChatRequest:
        """The chat that this request asks for. `able`: the model has thoughts. Raises `ApiError`."""
        tools = [{"type": "function", "function": tool.function.model_dump()} for tool in self.tools or ()]
        messages = [message.fields(number) for number, message in enumerate(self.messages)]
        return self.chat_of(config, messages, tools=tools or None, able=able)


class OllamaGenerateRequest(OllamaRequest):
    """The body of `POST /api/generate`."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    context: Items[int] | None = None

    def check(self) -> None:
        """Raise `ApiError` for what this server does not support."""
        _refuse_images(self.images)
        for name, value, hint in (
            ("template", self.template, "the model has its own; raw: true sends the prompt as it is"),
            ("suffix", self.suffix, "this path continues a text at its end only"),
            ("context", self.context, "send the conversation to /api/chat"),
        ):
            if value:
                raise unsupported(name, f"{name} is not supported: {hint}")

    def chat(self, config: ServerConfig, *, able: bool) -> ChatRequest:
        """The chat that this request asks for: the prompt as a message. Raises `ApiError`."""
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.chat_of(config, messages, able=able)

    def completion(self, config: ServerConfig) -> CompletionRequest:
        """The completion that this request asks for: the prompt as it is. Raises `ApiError`."""
        self.thinking(able=False)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        prompt = f"{self.system}\n\n{self.prompt}" if self.system and not self.raw else self.prompt
        fields = self.fields(config)
        fields["max_tokens"] = fields["max_tokens"] or UNLIMITED
        return make_body(CompletionRequest, {**fields, "prompt": prompt, "logprobs": logprobs})


class OllamaShowRequest(Body):
    """The body of `POST /api/show`. Older clients call the model `name`."""

    model: str = ""
    name: str = ""


def tagged(name: str) -> str:
    """A model's name with its tag, as Ollama's clients write it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _refuse_images(images: list[Any] | None) -> None:
    if images:
        raise unsupported("images", "images are not supported; send text")
