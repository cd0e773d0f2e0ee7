"""Turns the body of a request into sampling parameters, a grammar, and options for the engine.

Clients of other servers send fields that mean nothing here, and must work. So an unknown field is ignored,
and the reply's header `X-Ignored-Fields` and the log name it. Two kinds are refused, because the answer would
not be what was asked for: features that are missing here, and names that look like a slip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from soothsay.core.grammar import Grammar
from soothsay.core.params import BOUNDS, SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.errors import RequestError
from soothsay.server.engines.engine_messages import RequestOptions
from soothsay.server.generation.message_bodies import AllowedTools, NamedTool
from soothsay.server.generation.request_bodies import (
    UNLIMITED,
    AnyRequest,
    ChatRequest,
    GenerationRequest,
    Speculation,
    StructuredOutputs,
)
from soothsay.server.http.api_errors import ApiError, invalid, unknown, unsupported
from soothsay.server.http.bodies import Json
from soothsay.server.server_config import ServerConfig

SHARED = GenerationRequest.model_fields.keys() & {field.name for field in fields(SamplingParams)}
"""Fields that `SamplingParams` has too. Those with another form here are read one by one."""

ANY_NUMBER = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields whose numbers may be out of range in the APIs of Ollama and llama.cpp."""

GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = {
    "json_": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""What makes a grammar of a field of `StructuredOutputs`, or of the same field after `guided_`."""

MAX_SESSION = 256
"""Limit of characters of a session's name. What follows is ignored."""


def request_options(body: GenerationRequest, owner: str = "") -> RequestOptions:
    """Read the drafter, its limits, the priority and the tenant from a body. Raises `ApiError`.

    `speculation: false` means plain decoding. Requests with different `owner` or `cache_salt` have different
    tenants. `owner` comes from the key itself: its name may be given to somebody else.
    """
    asked, extra = body.speculation, body.model_extra or {}
    given = asked if isinstance(asked, Speculation) else Speculation()
    if given.trace and not body.stream:
        raise invalid("speculation.trace", "speculation.trace needs stream=true")
    names = [extra.get(field) for field in ("prompt_cache_key", "user")]
    return RequestOptions(
        drafter="none" if asked is False else given.drafter,
        max_nodes=given.max_nodes,
        traced=bool(given.trace),
        priority=body.priority or 0,
        tenant=Tenant(owner, body.cache_salt or ""),
        session=next((name[:MAX_SESSION] for name in names if isinstance(name, str)), ""),
    )


def sampling_params(body: AnyRequest, config: ServerConfig, defaults: Mapping[str, float]) -> SamplingParams:
    """Read sampling parameters from a body.

    Args:
        body: the request.
        config: the server's limits.
        defaults: parameters that hold where the body leaves them out. The limits are for clients, not for
            these.

    Raises `ApiError` for parameters that contradict each other or exceed the server's limits.
    """
    logit_bias = _logit_bias(body, config)
    listed = [count for count in (body.prompt_logprobs, body.echoed_logprobs) if count is not None]
    _check_limits(body, config)
    given: dict[str, Any] = dict(defaults)
    given |= {name: value for name in SHARED if (value := getattr(body, name)) is not None}
    given |= {
        "logit_bias": logit_bias,
        "max_tokens": None if body.token_limit == UNLIMITED else body.token_limit,
        "logprobs": body.num_logprobs,
        "prompt_logprobs": max(listed, default=None),
        "seed": None if body.seed in (None, -1) else body.seed % 2**63,
        "stop": body.stops,
    }
    if body.num_candidates > (body.n or 1):
        given |= {"n": body.num_candidates, "logprobs": body.num_logprobs or 0}  # the best are chosen by them
    speculation = body.speculation
    if isinstance(speculation, Speculation) and speculation.verifier is not None:
        given["verifier"] = speculation.verifier
    if (grammar := _grammar(body)) is not None:
        given["grammar"] = grammar
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ApiError.from_request(error) from None


def chosen_tools(body: ChatRequest) -> tuple[list[Json], bool]:
    """The tools that the model may call, and whether it must call one. Raises `ApiError` for a wrong name."""
    tools, choice = [tool.model_dump(exclude_none=True) for tool in body.tools or ()], body.tool_choice
    if choice == "none":
        return [], False
    if not isinstance(choice, NamedTool | AllowedTools):
        return tools, choice == "required"
    names = dict.fromkeys(one.function.name for one in choice.named)  # one that is named twice is one tool
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise invalid("tool_choice", f"no such tool in tools: {name!r}")
    return [by_name[name] for name in names], choice.forced


def truncated(ids: list[int], body: GenerationRequest, max_context: int) -> list[int]:
    """The end of a prompt, if the request limits its tokens. -1 leaves room for the answer."""
    limit = body.truncate_prompt_tokens
    if limit == -1:
        limit = max(max_context - max(body.max_tokens or 1, 1), 1)
    return ids if limit is None else ids[-limit:]


def _logit_bias(body: GenerationRequest, config: ServerConfig) -> dict[int, float] | None:
    if body.logit_bias is None:
        return None
    if len(body.logit_bias) > config.max_logit_bias:
        raise invalid("logit_bias", f"logit_bias has more than {config.max_logit_bias} tokens")
    for token, bias in body.logit_bias.items():
        if not re.fullmatch("0|-?[1-9][0-9]{0,9}", token):  # one way to write each, so that none comes twice
            raise invalid("logit_bias", "logit_bias must map token ids to numbers")
        _check_range("logit_bias", f"the bias of token {token}", bias, -config.max_bias, config.max_bias)
    return {int(token): bias for token, bias in body.logit_bias.items()}


def _check_range(param: str, name: str, value: float | None, low: float, high: float) -> None:
    """Raise `ApiError` if a number is not in the range that the server allows."""
    if value is not None and not low <= value <= high:
        raise invalid(param, f"{name} is {value:g}; this server allows {low:g} to {high:g}")


def _ranges(config: ServerConfig) -> dict[str, tuple[float, float]]:
    """The lowest and the highest number that the server allows, by parameter."""
    penalty, repetition = config.max_penalty, config.max_repetition_penalty
    return {
        "temperature": (0.0, config.max_temperature),
        "presence_penalty": (-penalty, penalty),
        "frequency_penalty": (-penalty, penalty),
        "repetition_penalty": (1 / repetition, repetition),
    }


def nearest(fields: Mapping[str, Any], config: ServerConfig | None = None) -> Json:
    """Fields with the nearest numbers that are possible, and that `config` allows.

    llama.cpp takes impossible numbers, such as a `top_k` of -7. Ollama takes any number.
    """
    allowed = {} if config is None else _ranges(config)
    ranges = {name: (bounds.low, bounds.high) for name, bounds in BOUNDS.items()} | allowed
    numbers = {name: value for name in ANY_NUMBER if (value := fields.get(name)) is not None}
    moved = {name: min(max(value, ranges[name][0]), ranges[name][1]) for name, value in numbers.items()}
    return {**fields, **moved}


def _check_limits(body: AnyRequest, config: ServerConfig) -> None:
    """Raise `ApiError` for the first field that breaks a rule."""
    for name, count in ((body.logprobs_field, body.num_logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if count is not None and not 0 <= count <= config.max_logprobs:
            limits = f"between 0 and {config.max_logprobs}"
            raise invalid(name, f"{name}={count} is not possible: it must be {limits}")
    for name, (low, high) in _ranges(config).items():
        _check_range(name, name, getattr(body, name), low, high)
    texts = (
        ("stop", body.stops, config.max_stops),
        ("bad_words", body.bad_words or [], config.max_bad_words),
    )
    for name, given, most in texts:
        if len(given) > most or any(len(text) > config.max_stop_length for text in given):
            limits = f"{most} strings of {config.max_stop_length} characters"
            raise invalid(name, f"{name} is limited to {limits}")
    n, tokens = 1 if body.n is None else body.n, len(body.stop_token_ids or ())
    rules = (
        ("prompt_logprobs", body.prompt_logprobs is not None and body.stream, " needs stream=false"),
        ("n", not 1 <= n <= config.max_n, f"={n} is not possible: it must be between 1 and {config.max_n}"),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens == 0, " must be at least 1, or -1"),
        ("stop_token_ids", tokens > config.max_stops, f" has more than {config.max_stops} tokens"),
        ("stream_options", body.stream_options is not None and not body.stream, " needs stream=true"),
        *body.own_rules(config.max_n),
    )
    for name, broken, problem in rules:
        if broken:
            raise invalid(name, f"{name}{problem}")


def _grammar(body: AnyRequest) -> Grammar | None:
    """The grammar that the answer's text must follow, from whichever field has it. None: no grammar."""
    outputs, wanted = body.structured_outputs or StructuredOutputs(), body.response_format
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        message = "response_format needs json_schema if its type is json_schema, and only then"
        raise invalid("response_format", message)
    if outputs.structural_tag is not None:
        message = "structural_tag is not supported: use json, json_object, regex, choice or grammar"
        raise invalid("structured_outputs.structural_tag", message)
    given = [(make, form) for make, form in _forms(body, outputs) if form is not None]
    if len(given) > 1:
        raise invalid("response_format", "give only one of response_format, structured_outputs and guided_*")
    try:
        return given[0][0](given[0][1]) if given else None
    except RequestError as error:
        raise invalid("response_format", str(error)) from None


def _forms(body: AnyRequest, outputs: StructuredOutputs) -> Iterator[tuple[Callable[[Any], Grammar], Any]]:
    """What makes a grammar of each field that may have one, and what the field has."""

    def any_object(_: object) -> Grammar:
        return Grammar.json_object()

    for name, make in GRAMMARS.items():
        yield make, getattr(body, f"guided_{name.rstrip('_')}")
        yield make, getattr(outputs, name)
    yield any_object, outputs.json_object or None
    wanted = body.response_format
    if wanted is not None and wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        yield Grammar.json_schema, wanted.json_schema.schema_
    elif wanted is not None and wanted.type != "text":
        yield any_object, True


HEADER = "X-Ignored-Fields"

WITHOUT_EFFECT = frozenset(
    {
        *("guided_decoding_backend", "guided_whitespace_pattern", "kv_transfer_params", "metadata"),
        *("mm_processor_kwargs", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user"),
        *("verbosity", "vllm_xargs"),
    }
)
"""Fields that are hints, or that concern accounting, storage and speed. They are not reported."""

MISSING = {
    "audio": "answers are text",
    "chat_template": "the model's own template is used",
    "documents": "put the texts into messages",
    "ebnf": "give a grammar in Lark as structured_outputs.grammar, or a JSON schema",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "grammar": "give a grammar in Lark as structured_outputs.grammar, or a JSON schema",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "prompt_embeds": "give a text or token ids",
    "suffix": "this model continues a text at its end only",
    "use_beam_search": "use best_of",
    "web_search_options": "this server does not search",
}
"""Fields that ask for what this server lacks, and what to do instead."""

SIMILAR = 0.9
"""Similarity, as `difflib` has it, from which a name counts as a slip: one wrong letter in ten, or one too
many or too few in six. Names of other servers' own fields are less similar to ours."""

MAX_NAMES = 32
"""Limit of unknown names that are looked at. Clients that are meant to work send a handful."""

UNSET: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing."""

PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What a name must look like to be repeated in a header and in the log."""


def further_fields(
    extra: Mapping[str, Any] | None,
    refused: Mapping[str, str],
    renamed: Mapping[str, str],
    ignored: Collection[str],
) -> dict[str, Any]:
    """The fields of a body of another API that go to the chat as they are.

    Args:
        extra: the fields of the body that its class does not list.
        refused: fields that cannot be served, unless they are empty, and what to do instead.
        renamed: fields of chats that the API has under another name; empty: not at all.
        ignored: fields that have no effect.

    Raises `ApiError` for fields that this server, or the API, does not have.
    """
    for name, value in (extra or {}).items():
        if name in refused and value not in UNSET:
            raise unsupported(name, f"{name}: {refused[name]}")
        if name in renamed:
            hint = f"; use {renamed[name]}" if renamed[name] else ""
            message = f"{name} is not a parameter of this path{hint}"
            raise ApiError(400, message, "unknown_parameter", param=name)
    known = {*ignored, *refused}
    return {name: value for name, value in (extra or {}).items() if name not in known}


def ignored_fields(body: GenerationRequest, missing: Mapping[str, str] = MISSING) -> list[str]:
    """The names of unknown fields that have a value and are ignored. `missing`: see `MISSING`.

    Raises `ApiError` for a field that asks for what is missing here, or that looks like a misspelt one.
    """
    given = [name for name, value in (body.model_extra or {}).items() if value not in UNSET]
    names = []
    for name in given[:MAX_NAMES]:
        if name in missing:
            raise unsupported(name, f"{name} is not supported: {missing[name]}")
        if name in WITHOUT_EFFECT or not PLAIN.fullmatch(name):
            continue
        if get_close_matches(name, type(body).model_fields, n=1, cutoff=SIMILAR):
            raise unknown(name, type(body).model_fields)
        names.append(f"{name} (give speculation.{name})" if name in Speculation.model_fields else name)
    return names
