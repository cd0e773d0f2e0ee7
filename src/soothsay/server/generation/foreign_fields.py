"""Fields of llama.cpp's and SGLang's servers that mean what ours mean under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OUR_NAMES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
    "regex": "guided_regex",
}
"""Names of fields, and our names of them. Ours win where a body has both."""

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
