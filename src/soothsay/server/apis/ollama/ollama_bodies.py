"""The bodies of Ollama's API, and the chats and completions that they ask for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from soothsay.server.generation.body_unions import LenientBody
from soothsay.server.generation.reply_format import Json
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest, Items, Whole
from soothsay.server.generation.request_parameters import nearest
from soothsay.server.generation.service import make_body
from soothsay.server.http.api_errors import unsupported
from soothsay.server.server_config import ServerConfig

Truncated = Annotated[int, BeforeValidator(lambda value: int(value) if isinstance(value, float) else value)]
"""A number whose fraction is dropped, as Ollama does with options."""


class OllamaOptions(LenientBody):
    """How to sample. What is not given has this server's default."""

    temperature: float | None = None
    top_k: Truncated | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Truncated | None = None
    num_predict: Truncated | None = None
    stop: str | Items[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def fields(self, config: ServerConfig) -> Json:
        """The fields of a chat or a completion that mean the same. Negative numbers mean "no limit"."""
        given: Json = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return nearest(given, config)


class OllamaRequest(LenientBody):
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

    @property
    def chat_logprobs(self) -> Json:
        """The fields of a chat that ask for log-probabilities."""
        return {"logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {}


class OllamaFunctionCall(LenientBody):
    """The function of a call, with its arguments as an object."""

    name: str
    arguments: Annotated[Json, Field(default_factory=dict)]


class OllamaCall(LenientBody):
    """A call in an earlier message of the model."""

    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(LenientBody):
    """One message of a conversation."""

    role: str
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    thinking: str | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def fields(self, number: int) -> Json:
        """The message of a chat. `number` tells apart the calls of messages. Raises `ApiError`."""
        _refuse_images(self.images)
        message: Json = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}_{place}",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                    },
                }
                for place, call in enumerate(self.tool_calls)
            ]
        names = {
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.thinking,
        }
        return message | {name: value for name, value in names.items() if value is not None}


class OllamaFunction(LenientBody):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: Json | None = None


class OllamaTool(LenientBody):
    """A tool that the model may call."""

    function: OllamaFunction


class OllamaChatRequest(OllamaRequest):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, default_factory=list)]
    tools: Items[OllamaTool] | None = None

    def chat(self, config: ServerConfig, *, able: bool) -> ChatRequest:
        """The chat that this request asks for. `able`: the model has thoughts. Raises `ApiError`."""
        tools = [{"type": "function", "function": tool.function.model_dump()} for tool in self.tools or ()]
        return make_body(
            ChatRequest,
            {
                **self.fields(config),
                **self.chat_logprobs,
                **self.thinking(able=able),
                "messages": [message.fields(number) for number, message in enumerate(self.messages)],
                "tools": tools or None,
            },
        )


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
            ("suffix", self.suffix, "the model continues texts; it does not fill gaps"),
            ("context", self.context, "send the conversation to /api/chat"),
        ):
            if value:
                raise unsupported(name, f"{name} is not supported: {hint}")

    def chat(self, config: ServerConfig, *, able: bool) -> ChatRequest:
        """The chat that this request asks for: the prompt as a message. Raises `ApiError`."""
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        fields = {**self.fields(config), **self.chat_logprobs, **self.thinking(able=able)}
        return make_body(ChatRequest, {**fields, "messages": messages})

    def completion(self, config: ServerConfig) -> CompletionRequest:
        """The completion that this request asks for: the prompt as it is. Raises `ApiError`."""
        self.thinking(able=False)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        prompt = f"{self.system}\n\n{self.prompt}" if self.system and not self.raw else self.prompt
        return make_body(CompletionRequest, {**self.fields(config), "prompt": prompt, "logprobs": logprobs})


class OllamaShowRequest(LenientBody):
    """The body of `POST /api/show`. Older clients call the model `name`."""

    model: str = ""
    name: str = ""


def tagged(name: str) -> str:
    """A model's name with its tag, as Ollama's clients write it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _refuse_images(images: list[Any] | None) -> None:
    if images:
        raise unsupported("images", "images are not supported; send text")
