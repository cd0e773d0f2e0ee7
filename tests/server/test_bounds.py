"""The ranges of numbers in requests: OpenAI's by default, wider where the operator says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Running

from soothsay.core.params import SamplingParams
from soothsay.server.generation.request_bodies import CompletionRequest
from soothsay.server.generation.request_parameters import (
    MAX_SESSION,
    request_options,
    sampling_params,
    truncated,
)
from soothsay.server.generation.request_prompts import MAX_READ, MAX_SCORES, check_totals
from soothsay.server.http.api_errors import ApiError
from soothsay.server.server_config import ServerConfig

WIDE = ServerConfig(
    name="m", max_temperature=1e6, max_penalty=1e6, max_bias=1e6, max_repetition_penalty=1e3, max_n=16
)
OUTSIDE = [
    ("temperature", 2.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 10.1),
    ("repetition_penalty", 0.09),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": -101}),
]


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="x", **fields)


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_numbers_outside_of_openai_s_ranges_need_the_operator_s_word(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match="this server allows") as refused:
        sampling_params(body(**{name: value}), ServerConfig(name="m"), {})
    assert (refused.value.status, refused.value.param) == (400, name)
    allowed = getattr(sampling_params(body(**{name: value}), WIDE, {}), name)
    assert allowed == ({1: value["1"]} if isinstance(value, dict) else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 10),
        ("repetition_penalty", 0.1),
        ("logit_bias", {"1": 100, "2": -100}),
    ],
)
def test_both_ends_are_allowed(name: str, value: Any) -> None:
    sampling_params(body(**{name: value}), ServerConfig(name="m"), {})


def test_the_name_of_a_session_is_cut() -> None:
    for field in ("prompt_cache_key", "user"):
        assert request_options(body(**{field: "é" * 1_000_000})).session == "é" * MAX_SESSION
    assert request_options(body()).session == ""


@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "repetition_penalty"])
def test_no_operator_can_allow_what_float32_cannot_bear(name: str) -> None:
    reckless = ServerConfig(name="m", max_temperature=1e300, max_penalty=1e300, max_repetition_penalty=1e300)
    with pytest.raises(ApiError, match=rf"^{name}=1e\+299 is not possible"):
        sampling_params(body(**{name: 1e299}), reckless, {})


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 1e308, "speculation": {"verifier": "rejection"}},
        {"frequency_penalty": -1e308},
        {"logit_bias": {"1": 1e39}},
        {"temperature": 10**400},
        {"top_k": 10**400},
        {"min_tokens": 10**400},
        {"max_tokens": 10**400},
        {"n": 10**400},
        {"logprobs": 10**400},
        {"stop_token_ids": [10**400]},
        {"logit_bias": {"1" * 400: 1}},
        {"temperature": True},
        {"n": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_huge_numbers_are_refused_with_their_name(running: Running, change: dict[str, Any]) -> None:
    asked = {"model": "sibyl", "prompt": "A man", "max_tokens": 3, **change}
    reply = httpx.post(f"{running.url}/v1/completions", json=asked, timeout=60)
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"] or "").partition(".")[0] in (next(iter(change)), "")
    assert len(reply.text) < 1000


@pytest.mark.parametrize(
    ("limit", "max_tokens", "left"),
    [(None, 3, 10), (4, 3, 4), (99, 3, 10), (-1, 3, 5), (-1, None, 7), (-1, 8, 1), (-1, 100, 1)],
)
def test_the_end_of_a_prompt_is_left(limit: int | None, max_tokens: int | None, left: int) -> None:
    asked, ids = body(truncate_prompt_tokens=limit, max_tokens=max_tokens), [*range(10)]
    assert truncated(ids, asked, max_context=8) == ids[10 - left :]


@pytest.mark.parametrize(
    ("lengths", "n", "scores"),
    [
        ([MAX_READ + 1], 1, None),
        ([MAX_READ // 2] * 2, 1, None),
        ([MAX_SCORES // 21], 1, 20),
        ([999] * 16, 16, 0),
    ],
)
def test_much_is_read_and_scored(lengths: list[int], n: int, scores: int | None) -> None:
    check_totals([[0] * length for length in lengths], SamplingParams(n=n, prompt_logprobs=scores))


@pytest.mark.parametrize(
    ("lengths", "n", "scores", "param"),
    [
        ([MAX_READ // 16 + 1], 16, None, "prompt"),
        ([MAX_READ // 64 + 1] * 64, 1, None, "prompt"),
        ([MAX_SCORES // 21 + 1], 1, 20, "prompt_logprobs"),
        ([MAX_SCORES // 21 // 16 + 1], 16, 20, "prompt_logprobs"),
        ([MAX_SCORES // 64 + 1] * 64, 1, 0, "prompt"),
        ([2001] * 16, 16, 20, "prompt_logprobs"),
    ],
)
def test_products_of_prompts_answers_and_alternatives_are_bounded(
    lengths: list[int], n: int, scores: int | None, param: str
) -> None:
    prompts = [[0] * length for length in lengths]
    with pytest.raises(ApiError, match="is the limit") as refused:
        check_totals(prompts, SamplingParams(n=n, prompt_logprobs=scores))
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 20, "n": 16}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "n": 16, "stream": True}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "best_of": 16}),
        ("/v1/completions", {"prompt_logprobs": 20, "n": 16}),
        ("/completion", {"prompt_logprobs": 20, "n_cmpl": 16}),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_computed(
    running: Running, path: str, change: dict[str, Any]
) -> None:
    before = running.gauge("prompt_tokens_total")
    asked = {"prompt": [[first, *range(800)] for first in range(8)], "max_tokens": 1, **change}
    reply = httpx.post(f"{running.url}{path}", json=asked, timeout=60)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "prompt_logprobs"
    assert "n=16 answers to each of 8 prompts list 2153" in reply.json()["error"]["message"]
    assert running.gauge("prompt_tokens_total") == before
