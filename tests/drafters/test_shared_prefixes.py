"""Drafters that read the features of all tokens, after other drafters' requests have read the prompt."""

from __future__ import annotations

import warnings

import pytest
from every_drafter import resolve

from soothsay import LLM, Drafter, SamplingParams, Target
from soothsay.core.answer import SpeculationStats
from soothsay.drafters.control.compose import Merged
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.registry import build_drafter

PARAMS = SamplingParams(temperature=0, max_tokens=24)
TEXT = "Write a long story about a man in a blue shirt who climbs a ladder to mend the roof of a house, " * 3

FEATURES = ["eagle", "eagle2", "eagle3", "mtp", "block", "dflash(model=DFLASH)", "peagle(model=PEAGLE)"]
"""Drafters that read the features of all tokens."""

LAST_FEATURE = ["medusa", "hydra", "redrafter(model=UNTRAINED)"]
"""Drafters that read the features of the last token alone."""


@pytest.fixture(scope="module")
def forgetful() -> LLM:
    return LLM("sibyl", drafter="none", kv_tokens=2048, prefix_caching=False)


def answered(llm: LLM, spec: str) -> tuple[SpeculationStats, int]:
    """How well a drafter drafts, and how many tokens of the prompt are not read again."""
    (request,) = llm.requests(llm.chat_prompt(TEXT), PARAMS, drafter=resolve(spec))
    llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    return request.stats, request.num_prefix_hits


@pytest.mark.parametrize("spec", [*FEATURES, *LAST_FEATURE, "prompt-lookup + eagle3"])
def test_drafts_are_as_good_after_a_prompt_that_another_drafter_s_request_has_read(
    spec: str, forgetful: LLM
) -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=2048)
    _, hits = answered(llm, "none"), answered(llm, "none")[1]
    assert hits > 16
    expected = answered(forgetful, spec)[0]
    stats, again = answered(llm, spec)
    assert (stats.accepted_at, stats.steps) == (expected.accepted_at, expected.steps)
    assert again == (hits if spec in LAST_FEATURE else 0), "others read the prompt again"
    stats, again = answered(llm, spec)
    assert (stats.accepted_at, stats.steps) == (expected.accepted_at, expected.steps)
    assert again == hits, "it is known from then on"
    assert answered(llm, "none")[1] == hits, "to other drafters, too"


def test_a_controller_does_not_read_a_prompt_again() -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=2048)
    _, hits = answered(llm, "none"), answered(llm, "none")[1]
    assert answered(llm, "prompt-lookup | eagle3")[1] == hits


class Keeping(Merged):
    """Takes all prefix hits, as a controller does."""

    num_known = Controller.num_known


def test_a_head_without_a_text_s_beginning_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.drafters.base.WATCHED_STEPS", 8)

    def untrained(target: Target) -> Drafter:
        return Keeping(target, [build_drafter(resolve("eagle3(model=UNTRAINED)"), target)])

    llm = LLM("sibyl", drafter="none", kv_tokens=2048)
    prompt = llm.chat_prompt(TEXT)
    llm.generate(prompt, PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(prompt, PARAMS, drafter=untrained)
    with pytest.warns(UserWarning, match="probably trained for another model"):
        llm.generate(prompt[1:], PARAMS, drafter=untrained)


def test_no_block_of_a_prompt_is_held_twice() -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=2048)
    answered(llm, "none")
    known = llm.engine.allocator.num_cached
    answered(llm, "eagle3")
    assert llm.engine.allocator.num_cached == known
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
