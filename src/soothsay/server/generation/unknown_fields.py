"""What happens to fields of a request that this server does not have.

Clients of other servers send fields that mean nothing here, and must work. So an unknown field is ignored,
and the reply's header `X-Ignored-Fields` and the log name it. Two kinds are refused, because the answer would
not be what was asked for: features that are missing here, and names that look like a slip.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from soothsay.server.generation.request_bodies import GenerationRequest
from soothsay.server.http.api_errors import ApiError, unsupported

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


def ignored_fields(body: GenerationRequest) -> list[str]:
    """The names of unknown fields that have a value and are ignored.

    Raises `ApiError` for a field that asks for what is missing here, or that looks like a misspelt one.
    """
    given = [name for name, value in (body.model_extra or {}).items() if value not in UNSET]
    names = []
    for name in given[:MAX_NAMES]:
        if name in MISSING:
            raise unsupported(name, f"{name} is not supported: {MISSING[name]}")
        if name in WITHOUT_EFFECT or not PLAIN.fullmatch(name):
            continue
        if meant := get_close_matches(name, type(body).model_fields, n=1, cutoff=SIMILAR):
            message = f"{name} is not a parameter that this server knows; did you mean {meant[0]}?"
            raise ApiError(400, message, "unknown_parameter", param=name)
        names.append(name)
    return names
