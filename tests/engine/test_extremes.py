"""Extreme numbers in requests: each ends with tokens or is refused, and nobody else in the batch notices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soothsay import LLM, FinishReason, RequestError, SamplingParams
from soothsay.core.params import BOUNDS
from soothsay.core.verify import VERIFIERS
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.model.transformer import Transformer

PROMPT = [3, 14, 15, 9, 2, 6, 14, 15]
BYSTANDERS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=6, presence_penalty=0.5, ignore_eos=True),
]

SMALL = [0, -0.0, 5e-324, 1e-300, 1e-38, 1e-9, 1e-3, 0.5, 1.0, -1]
LARGE = [1e3, 1e6, 1e7, 1e30, 1e39, 1e300, 1e308, math.inf, 10**400, 2**31, 2**63]
EXTREME = st.sampled_from([*SMALL, *LARGE, *(-number for number in LARGE), math.nan, True, None, "1"])


def in_bounds(name: str) -> st.SearchStrategy[Any]:
    """Numbers at and between the bounds of a parameter."""
    bounds = BOUNDS[name]
    between = st.integers(0, 20) if bounds.whole else st.floats(bounds.low, bounds.high)
    small = st.just(0) if bounds.whole else st.sampled_from([1e-300, 1e-38, 1e-9, 1.0])
    return st.one_of(st.sampled_from([bounds.low, bounds.high]), between, small)


NUMBERS = [name for name in BOUNDS if name not in ("n", "logprobs", "max_tokens", "min_tokens")]
BIAS = st.one_of(st.sampled_from([-1e6, 1e6, -math.inf]), st.floats(-1e6, 1e6))
TOKENS = st.one_of(st.integers(0, 96), st.sampled_from([-1, 97, 2**70, True, "3", None, 0.5]))
VALID = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6)},
    optional={name: in_bounds(name) for name in NUMBERS}
    | {
        "n": st.sampled_from([1, 2]),
        "min_tokens": st.sampled_from([0, 1]),
        "logprobs": st.sampled_from([0, 5, 97]),
        "logit_bias": st.one_of(
            st.dictionaries(st.integers(0, 96), BIAS, max_size=5),
            st.just(dict.fromkeys(range(97), -1e6)),
            st.just(dict.fromkeys(range(96), -math.inf)),
        ),
        "stop_token_ids": st.lists(st.integers(0, 96), max_size=97),
        "ignore_eos": st.booleans(),
    },
)
WRONG = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(BOUNDS, EXTREME)
    | {
        "logit_bias": st.dictionaries(TOKENS, st.one_of(BIAS, EXTREME), max_size=3),
        "stop_token_ids": st.lists(TOKENS, max_size=2),
    },
)
PARAMS = st.one_of(VALID, VALID, VALID, st.builds(lambda good, bad: good | bad, VALID, WRONG))


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Transformer]) -> LLM:
    draft = tiny(1)
    return LLM(
        tiny(),
        drafter=lambda target: DraftModel(target, draft, depth=2, width=2, branch=2),
        max_context=64,
        kv_tokens=1024,
    )


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_request_ends_and_bystanders_keep_their_tokens(llm: LLM, verifier: str) -> None:
    meant = [llm.generate(PROMPT, params).token_ids for params in BYSTANDERS]
    served, longest = 0, [0]
    examples = 150 if verifier == "match" else 70  # they are the same for all

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(PARAMS)
    def run(asked: dict[str, Any]) -> None:
        nonlocal served
        try:
            extreme = SamplingParams(**asked, verifier=verifier)
        except RequestError as error:
            longest[0] = max(longest[0], len(str(error)))
            return
        first, result, last = llm.generate([PROMPT] * 3, [BYSTANDERS[0], extreme, BYSTANDERS[1]])
        assert [first.token_ids, last.token_ids] == meant
        served += 1
        for choice in result.choices:
            if choice.finish_reason is FinishReason.ERROR:
                assert choice.error
                assert "the engine failed" not in choice.error
            else:
                assert choice.token_ids or asked.get("max_tokens") == 0
                assert all(0 <= token < 97 for token in choice.token_ids)
                for one in choice.logprobs or ():
                    assert math.isfinite(one.logprob)

    before = llm.engine.recovery.num_failed
    run()
    assert llm.engine.recovery.num_failed == before
    assert longest[0] < 300
    assert served > examples / 2, "most are not refused"


@pytest.mark.parametrize(
    "given",
    [
        {"presence_penalty": 1e308, "verifier": "rejection"},
        {"frequency_penalty": -1e308},
        {"logit_bias": {1: 1e39}},
        {"temperature": 1e300},
        {"seed": 2**63},
        {"temperature": True},
        {"n": True},
        {"logit_bias": {1: True}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": [1]},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"stop_token_ids": [0.5]},
        {"stop_token_ids": 3},
        {"stop": 3},
        {"verifier": ["match"]},
        {"top_k": 10**5000},
        {"max_tokens": 10**400},
    ],
)
def test_what_float32_cannot_bear_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(given))}"):
        SamplingParams(**given)


def test_both_ends_of_every_range_are_allowed() -> None:
    for name, bounds in BOUNDS.items():
        for value in (bounds.low, bounds.high):
            SamplingParams(**{"max_tokens": None, name: value})
    SamplingParams(logit_bias={0: -1e6, 1: 1e6, 2: -math.inf})
