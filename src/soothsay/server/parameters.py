"""From what clients send to what the engine takes: sampling parameters, and the form of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soothsay.engine.grammar import Grammar
from soothsay.engine.params import SamplingParams
from soothsay.errors import RequestError
from soothsay.server.config import ServerConfig
from soothsay.server.errors import ApiError
from soothsay.server.protocol import ChatRequest, CompletionRequest, Generation, Speculation

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
)
"""Fields that mean what the engine's parameters of the same name do."""

COMPLETION_TOKENS = 16
"""Tokens of a completion that says nothing of its length, as OpenAI has it. A chat goes on to its end."""


@dataclass(frozen=True, slots=True)
class Speculating:
    """What a request wants of the engine besides its tokens."""

    drafter: str | None = None  # by name; None: the model's own
    max_nodes: int | None = None  # guesses verified a step at most; None: as many as the engine likes
    traced: bool = False  # whether every step's tree is told
    priority: int = 0  # lower goes first


def speculating(body: Generation) -> Speculating:
    """Who guesses for a request and how much, and when its turn is. Raises `ApiError`.

    `speculation: false` is plain decoding.
    """
    asked = body.speculation
    wanted = asked if isinstance(asked, Speculation) else Speculation()
    if wanted.trace and not body.stream:
        raise _wrong("speculation.trace", "speculation.trace needs stream=true")
    return Speculating(
        drafter="none" if asked is False else wanted.drafter,
        max_nodes=wanted.max_nodes,
        traced=bool(wanted.trace),
        priority=body.priority or 0,
    )


def sampling_params(
    body: ChatRequest | CompletionRequest, config: ServerConfig, forced: str | None = None
) -> SamplingParams:
    """How to sample. Raises `ApiError` for what cannot be meant, or is more than the server allows.

    `forced` is a grammar, in Lark, that the server itself wants the answer to have: a call of a tool.
    """
    given: dict[str, Any] = {name: value for name in SHARED if (value := getattr(body, name)) is not None}
    given["logit_bias"] = _logit_bias(body, config)
    given["max_tokens"] = _max_tokens(body)
    given["logprobs"] = _logprobs(body, config)
    speculation = body.speculation
    if isinstance(speculation, Speculation) and speculation.verifier is not None:
        given["verifier"] = speculation.verifier
    _check_limits(body, config)
    if (grammar := _grammar(body, forced)) is not None:
        given["grammar"] = grammar
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ApiError.from_request(error) from None


def _max_tokens(body: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise _wrong("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    return older if newer is None else newer


def _logprobs(body: ChatRequest | CompletionRequest, config: ServerConfig) -> int | None:
    if isinstance(body, CompletionRequest):
        name, count = "logprobs", body.logprobs
    else:
        name, count = "top_logprobs", body.top_logprobs
        if count is not None and not body.logprobs:
            raise _wrong(name, "top_logprobs needs logprobs=true")
        if body.logprobs and count is None:
            count = 0
    if count is not None and not 0 <= count <= config.max_logprobs:
        raise _wrong(name, f"{name}={count} is not possible: it must be between 0 and {config.max_logprobs}")
    return count


def _logit_bias(body: Generation, config: ServerConfig) -> dict[int, float] | None:
    if body.logit_bias is None:
        return None
    if len(body.logit_bias) > config.max_logit_bias:
        raise _wrong("logit_bias", f"logit_bias may name {config.max_logit_bias} tokens")
    try:
        return {int(token): bias for token, bias in body.logit_bias.items()}
    except ValueError:
        raise _wrong("logit_bias", "logit_bias is a mapping from token ids to numbers") from None


def _check_limits(body: ChatRequest | CompletionRequest, config: ServerConfig) -> None:
    if (body.n or 1) > config.max_n:
        raise _wrong("n", f"n={body.n} is not possible: it must be between 1 and {config.max_n}")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > config.max_stops or any(len(stop) > config.max_stop_length for stop in stops):
        limit = f"{config.max_stops} strings of {config.max_stop_length} characters"
        raise _wrong("stop", f"stop has more than {limit}")
    if len(body.stop_token_ids or ()) > config.max_stops:
        raise _wrong("stop_token_ids", f"stop_token_ids has more than {config.max_stops} tokens")
    if body.stream_options is not None and not body.stream:
        raise _wrong("stream_options", "stream_options needs stream=true")
    if isinstance(body, CompletionRequest):
        if body.best_of not in (None, body.n or 1):
            raise _wrong("best_of", "best_of other than n is not supported")
        if body.echo and body.logprobs is not None:
            raise _wrong("echo", "echo with logprobs is not supported: prompts are not scored")


def _grammar(body: ChatRequest | CompletionRequest, forced: str | None) -> Grammar | None:
    """The form that the answer must have, if any."""
    outputs, wanted = body.structured_outputs, body.response_format
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise _wrong("response_format", "response_format of type json_schema, and only it, has a json_schema")
    forms: list[tuple[str, Any]] = [
        ("json_schema", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("lark", body.guided_grammar),
        ("lark", forced),
    ]
    if outputs is not None:
        forms += [
            ("json_schema", outputs.json_),
            ("json_object", outputs.json_object or None),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("lark", outputs.grammar),
        ]
    if wanted is not None and wanted.json_schema is not None:
        forms.append(("json_schema", wanted.json_schema.schema_))
    elif wanted is not None and wanted.type == "json_object":
        forms.append(("json_object", True))
    asked = [(kind, form) for kind, form in forms if form is not None]
    if len(asked) > 1:
        raise _wrong(
            "response_format",
            "an answer can have one form; give one of response_format, guided_* and tool_choice",
        )
    if not asked:
        return None
    return make_grammar(*asked[0])


def make_grammar(kind: str, form: Any) -> Grammar:
    """A `Grammar` of a kind. Raises `ApiError` if it is none."""
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json_schema": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "lark": Grammar.lark,
    }
    try:
        return makers[kind](form)
    except RequestError as error:
        raise _wrong("response_format", str(error)) from None


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, "invalid_value", param=param)
