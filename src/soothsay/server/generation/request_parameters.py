"""Turns the body of a request into sampling parameters, a grammar, and options for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from soothsay.core.grammar import Grammar
from soothsay.core.params import BOUNDS, SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.errors import RequestError
from soothsay.server.engines.engine_messages import RequestOptions
from soothsay.server.generation.request_bodies import (
    AllowedTools,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
    Speculation,
)
from soothsay.server.http.api_errors import ApiError, invalid
from soothsay.server.server_config import ServerConfig

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "min_tokens",
    "n",
)
"""Fields that `SamplingParams` has too, with the same meaning."""

ANY_NUMBER = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields whose numbers may be out of range in the APIs of Ollama and llama.cpp."""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as OpenAI has it. A chat has no default limit."""


MAX_SESSION = 256
"""Limit of characters of a session's name. What follows is ignored."""

UNLIMITED = -1
"""`max_tokens` of clients that want as many tokens as the context holds."""


def request_options(body: GenerationRequest, owner: str = "") -> RequestOptions:
    """Read the drafter, its limits, the priority and the tenant from a body. Raises `ApiError`.

    `speculation: false` means plain decoding. Requests with different `owner` or `cache_salt` have different
    tenants. `owner` comes from the key itself: its name may be given to somebody else.
    """
    asked = body.speculation
    given = asked if isinstance(asked, Speculation) else Speculation()
    if given.trace and not body.stream:
        raise _invalid("speculation.trace", "speculation.trace needs stream=true")
    return RequestOptions(
        drafter="none" if asked is False else given.drafter,
        max_nodes=given.max_nodes,
        traced=bool(given.trace),
        priority=body.priority or 0,
        tenant=Tenant(owner, body.cache_salt or ""),
        session=_session(body),
    )


def _session(body: GenerationRequest) -> str:
    """The name that a client gives to requests that belong together; empty: none."""
    extra = body.model_extra or {}
    names = [extra.get(field) for field in ("prompt_cache_key", "user")]
    return next((name[:MAX_SESSION] for name in names if isinstance(name, str)), "")


def sampling_params(
    body: ChatRequest | CompletionRequest,
    config: ServerConfig,
    defaults: Mapping[str, float],
) -> SamplingParams:
    """Read sampling parameters from a body.

    Args:
        body: the request.
        config: the server's limits.
        defaults: parameters that hold where the body leaves them out. The limits are for clients, not for
            these.

    Raises `ApiError` for parameters that contradict each other or exceed the server's limits.
    """
    given: dict[str, Any] = dict(defaults)
    given |= {name: value for name in SHARED if (value := getattr(body, name)) is not None}
    given["logit_bias"] = _logit_bias(body, config)
    given["max_tokens"] = _max_tokens(body)
    given["logprobs"] = _logprobs(body, config)
    given["prompt_logprobs"] = _prompt_logprobs(body, config)
    given["seed"] = None if body.seed in (None, -1) else body.seed % 2**63
    given["stop"] = _stops(body)
    if isinstance(body, CompletionRequest) and (body.best_of or 1) > (body.n or 1):
        given |= {"n": body.best_of, "logprobs": given["logprobs"] or 0}  # the best are chosen by them
    speculation = body.speculation
    if isinstance(speculation, Speculation) and speculation.verifier is not None:
        given["verifier"] = speculation.verifier
    _check_limits(body, config)
    if (grammar := _grammar(body)) is not None:
        given["grammar"] = grammar
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ApiError.from_request(error) from None


def chosen_tools(body: ChatRequest) -> tuple[list[dict[str, Any]], bool]:
    """The tools that the model may call, and whether it must call one. Raises `ApiError` for a wrong name."""
    tools, choice = [tool.model_dump(exclude_none=True) for tool in body.tools or ()], body.tool_choice
    if choice == "none":
        return [], False
    if not isinstance(choice, NamedTool | AllowedTools):
        return tools, choice == "required"
    named = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
    names = dict.fromkeys(one.function.name for one in named)  # one that is named twice is one tool
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise invalid("tool_choice", f"no such tool in tools: {name!r}")
    forced = isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"
    return [by_name[name] for name in names], forced


def truncated(ids: list[int], body: GenerationRequest, max_context: int) -> list[int]:
    """The end of a prompt, if the request limits its tokens. -1 leaves room for the answer."""
    limit = body.truncate_prompt_tokens
    if limit == -1:
        limit = max(max_context - max(body.max_tokens or 1, 1), 1)
    return ids if limit is None else ids[-limit:]


def _max_tokens(body: ChatRequest | CompletionRequest) -> int | None:
    newer = None if isinstance(body, CompletionRequest) else body.max_completion_tokens
    given = body.max_tokens if newer is None else newer
    if given is None and isinstance(body, CompletionRequest):
        return COMPLETION_TOKENS
    return None if given == UNLIMITED else given


def _logprobs(body: ChatRequest | CompletionRequest, config: ServerConfig) -> int | None:
    if isinstance(body, CompletionRequest):
        name, count = "logprobs", body.logprobs
    else:
        name, count = "top_logprobs", body.top_logprobs
        if count and not body.logprobs:
            raise _invalid(name, "top_logprobs needs logprobs=true")
        count = count or 0 if body.logprobs else None
    if count is not None and not 0 <= count <= config.max_logprobs:
        message = f"{name}={count} is not possible: it must be between 0 and {config.max_logprobs}"
        raise _invalid(name, message)
    return count


def _prompt_logprobs(body: ChatRequest | CompletionRequest, config: ServerConfig) -> int | None:
    """How many log-probabilities each token of the prompt needs, for `prompt_logprobs` or for `echo`."""
    count = body.prompt_logprobs
    if count is not None and not 0 <= count <= config.max_logprobs:
        message = f"prompt_logprobs={count} is not possible: it must be between 0 and {config.max_logprobs}"
        raise _invalid("prompt_logprobs", message)
    if count is not None and body.stream:
        raise _invalid("prompt_logprobs", "prompt_logprobs needs stream=false")
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return max((one for one in (count, echoed) if one is not None), default=None)


def _logit_bias(body: GenerationRequest, config: ServerConfig) -> dict[int, float] | None:
    if body.logit_bias is None:
        return None
    if len(body.logit_bias) > config.max_logit_bias:
        raise _invalid("logit_bias", f"logit_bias has more than {config.max_logit_bias} tokens")
    for token, bias in body.logit_bias.items():
        _check_range("logit_bias", f"the bias of token {token[:20]}", bias, -config.max_bias, config.max_bias)
    try:
        return {int(token): bias for token, bias in body.logit_bias.items()}
    except ValueError:
        raise _invalid("logit_bias", "logit_bias must map token ids to numbers") from None


def _check_range(param: str, name: str, value: float | None, low: float, high: float) -> None:
    """Raise `ApiError` if a number is not in the range that the server allows."""
    if value is not None and not low <= value <= high:
        message = f"{name} is {value:g}; this server allows {low:g} to {high:g}"
        raise _invalid(param, message)


def _ranges(config: ServerConfig) -> dict[str, tuple[float, float]]:
    """The lowest and the highest number that the server allows, by parameter."""
    penalty, repetition = config.max_penalty, config.max_repetition_penalty
    return {
        "temperature": (0.0, config.max_temperature),
        "presence_penalty": (-penalty, penalty),
        "frequency_penalty": (-penalty, penalty),
        "repetition_penalty": (1 / repetition, repetition),
    }


def nearest(fields: Mapping[str, Any], config: ServerConfig | None = None) -> dict[str, Any]:
    """Fields with the nearest numbers that are possible, and that `config` allows.

    llama.cpp takes impossible numbers, such as a `top_k` of -7. Ollama takes any number.
    """
    allowed = {} if config is None else _ranges(config)
    ranges = {name: (bounds.low, bounds.high) for name, bounds in BOUNDS.items()} | allowed
    numbers = {name: value for name in ANY_NUMBER if (value := fields.get(name)) is not None}
    moved = {name: min(max(value, ranges[name][0]), ranges[name][1]) for name, value in numbers.items()}
    return {**fields, **moved}


def _stops(body: GenerationRequest) -> list[str]:
    """The stop strings. Empty ones, which would end every answer, are left out, as llama.cpp does."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return [stop for stop in given if stop]


def _check_limits(body: ChatRequest | CompletionRequest, config: ServerConfig) -> None:
    for name, (low, high) in _ranges(config).items():
        _check_range(name, name, getattr(body, name), low, high)
    if (body.n or 1) > config.max_n:
        raise _invalid("n", f"n={body.n} is not possible: it must be between 1 and {config.max_n}")
    stops = _stops(body)
    if len(stops) > config.max_stops or any(len(stop) > config.max_stop_length for stop in stops):
        limit = f"{config.max_stops} strings of {config.max_stop_length} characters"
        raise _invalid("stop", f"stop is limited to {limit}")
    bad = body.bad_words or []
    if len(bad) > config.max_bad_words or any(len(word) > config.max_stop_length for word in bad):
        limit = f"{config.max_bad_words} strings of {config.max_stop_length} characters"
        raise _invalid("bad_words", f"bad_words is limited to {limit}")
    if body.truncate_prompt_tokens == 0:
        raise _invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1")
    if len(body.stop_token_ids or ()) > config.max_stops:
        raise _invalid("stop_token_ids", f"stop_token_ids has more than {config.max_stops} tokens")
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "stream_options needs stream=true")
    if isinstance(body, CompletionRequest) and body.best_of is not None:
        n = body.n or 1
        if not n <= body.best_of <= config.max_n:
            limits = f"between n={n} and {config.max_n}"
            raise _invalid("best_of", f"best_of={body.best_of} is not possible: it must be {limits}")
        if body.stream and body.best_of > n:
            raise _invalid(
                "best_of", "best_of needs stream=false: the best is known only when all answers have ended"
            )
    if isinstance(body, ChatRequest) and body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message needs add_generation_prompt=false"
        raise _invalid("continue_final_message", message)


def _grammar(body: ChatRequest | CompletionRequest) -> Grammar | None:
    """The grammar that the answer's text must follow, from whichever field has it. None: no grammar."""
    outputs, wanted = body.structured_outputs, body.response_format
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        message = "response_format needs json_schema if its type is json_schema, and only then"
        raise _invalid("response_format", message)
    forms: list[tuple[str, Any]] = [
        ("json_schema", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("lark", body.guided_grammar),
    ]
    if outputs is not None and outputs.structural_tag is not None:
        message = "structural_tag is not supported: use json, json_object, regex, choice or grammar"
        raise _invalid("structured_outputs.structural_tag", message)
    if outputs is not None:
        forms += [
            ("json_schema", outputs.json_),
            ("json_object", outputs.json_object or None),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("lark", outputs.grammar),
        ]
    if wanted is not None and wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        forms.append(("json_schema", wanted.json_schema.schema_))
    elif wanted is not None and wanted.type != "text":
        forms.append(("json_object", True))
    given = [(kind, form) for kind, form in forms if form is not None]
    if len(given) > 1:
        message = "give only one of response_format, structured_outputs and guided_*"
        raise _invalid("response_format", message)
    return _make_grammar(*given[0]) if given else None


def _make_grammar(kind: str, form: Any) -> Grammar:
    """Make a grammar of a kind. Raises `ApiError` if `form` is not valid."""
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
        raise _invalid("response_format", str(error)) from None


def _invalid(param: str, message: str) -> ApiError:
    return invalid(param, message)
