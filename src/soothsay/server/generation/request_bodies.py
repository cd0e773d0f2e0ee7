"""The bodies of requests. `request_parameters.py` says what happens to fields that are not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from soothsay.server.generation.message_bodies import (
    AllowedTools,
    ChatMessage,
    NamedTool,
    Tool,
    without_other_tools,
)
from soothsay.server.http.api_errors import unknown
from soothsay.server.http.bodies import MAX_FIELDS, Body, Fields, Items, TokenIds, Whole

OUR_NAMES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
    "regex": "guided_regex",
}
"""Names of fields of llama.cpp's and SGLang's servers, and ours. Ours win where a body has both."""

BANNED = -100.0
"""The bias of a token that llama.cpp's `false` bans."""

MAX_PAIRS = 2048
"""Limit of pairs in a list of biases that is turned into an object. Longer ones are refused as they are."""


def as_ours(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request with our names and forms of fields. Values are not checked here.

    Besides names: `n_predict: -2` means the same as -1, `logit_bias` may be a list of pairs, and a
    `response_format` of any JSON object may have a schema.
    """
    given = dict(body)
    for theirs, ours in OUR_NAMES.items():
        value = given.pop(theirs, None)
        if value is None or given.get(ours) is not None:
            continue
        if theirs != "n_predict":
            given[ours] = value
        elif given.get("max_completion_tokens") is None:
            given[ours] = -1 if value == -2 else value
    if isinstance(given.get("logit_bias"), list):
        given["logit_bias"] = _biases(given["logit_bias"])
    form = given.get("response_format")
    if isinstance(form, Mapping) and form.get("type") == "json_object" and form.get("schema") is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return given


def _biases(pairs: list[Any]) -> Any:
    """Biases by token, from pairs of a token's id and its bias; the list itself if it is none."""
    biases = {}
    for pair in pairs[:MAX_PAIRS]:
        if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], bool | list | dict):
            return pairs
        biases[str(pair[0])] = BANNED if pair[1] is False else pair[1]
    return biases if len(pairs) <= MAX_PAIRS else pairs


COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as OpenAI has it. A chat has no default limit."""

UNLIMITED = -1
"""`max_tokens` of clients that want as many tokens as the context holds."""

Rule = tuple[str, Any, str]
"""A field, whether it breaks the rule, and what is wrong then, to be read after the field's name."""

MAX_CHOICES = 16_384
"""Limit of texts that an answer may have to be one of. As a grammar, more would be too large."""

Choices = Annotated[Items[str], Field(max_length=MAX_CHOICES)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk


class Speculation(Body):
    """How to speculate: drafter, verifier, limit of draft tokens, and whether to report each step."""

    drafter: str | None = None
    verifier: str | None = None
    max_nodes: Whole | None = Field(default=None, ge=0)
    trace: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if value is not None and name not in cls.model_fields:
                raise unknown(name, cls.model_fields, "speculation.")
        return data


class StructuredOutputs(Body):
    """vLLM's field for a form that the answer must have. Only one of its fields may be set."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Any = None  # not supported


class JsonSchema(Body):
    """A JSON schema, which answers always follow. None: any object."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Body):
    """The form of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Body):
    """The fields that chats and completions share. None always means the default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None  # the server has one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = Field(default=None, ge=-(2**63), le=2**63 - 1)  # -1: a random one
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Fields[float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Items[str] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    max_tokens: Whole | None = None
    n: Whole | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = Field(default=None, ge=-1)  # -1: what the context holds
    add_special_tokens: bool | None = None
    answer_start: str | TokenIds | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculation: Speculation | bool | None = None
    priority: Whole | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, data: Any) -> Any:
        return as_ours(data) if isinstance(data, Mapping) and len(data) <= MAX_FIELDS else data

    @property
    def echoed_logprobs(self) -> int | None:
        """Log-probabilities for each token of the prompt that is echoed; None: there are none."""
        return None

    @property
    def num_candidates(self) -> int:
        """Answers to compute, of which the best `n` are told."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The stop strings. Empty ones, which would end every answer, are left out, as llama.cpp does."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None  # False: at most one call
    chat_template_kwargs: Fields[Any] | None = None
    modalities: Items[Literal["text"]] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None  # a variable of the template
    separate_reasoning: bool | None = None  # False: thoughts stay in the text, as in SGLang
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    logprobs_field: ClassVar = "top_logprobs"

    @property
    def token_limit(self) -> int | None:
        """The limit of tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that are listed beside each token's own; None: not even that."""
        return self.top_logprobs or 0 if self.logprobs else None

    def own_rules(self, _: int) -> Iterator[Rule]:
        """Rules of fields that completions lack."""
        yield "top_logprobs", self.top_logprobs and not self.logprobs, " needs logprobs=true"
        both = self.continue_final_message and self.add_generation_prompt
        yield "continue_final_message", both, " needs add_generation_prompt=false"

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        return without_other_tools(data) if isinstance(data, Mapping) else data


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: str | Items[str] | TokenIds | Items[TokenIds]
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Whole | None = None

    logprobs_field: ClassVar = "logprobs"

    @property
    def token_limit(self) -> int | None:
        """The limit of tokens of an answer."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that are listed beside each token's own; None: not even that."""
        return self.logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        """Log-probabilities for each token of the prompt, for `echo`."""
        return self.logprobs if self.echo else None

    @property
    def num_candidates(self) -> int:
        """Answers to compute, of which the best `n` are told."""
        return max(self.best_of or 1, self.n or 1)

    def own_rules(self, max_n: int) -> Iterator[Rule]:
        """Rules of fields that chats lack."""
        n, best = self.n or 1, self.best_of
        if best is not None:
            limits = f"between n={n} and {max_n}"
            yield "best_of", not n <= best <= max_n, f"={best} is not possible: it must be {limits}"
            late = " needs stream=false: the best is known only when all answers have ended"
            yield "best_of", self.stream and best > n, late


AnyRequest = ChatRequest | CompletionRequest
"""What all APIs ask for."""
