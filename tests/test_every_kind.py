"""The guarantee on one model of each kind of architecture, with every drafter of the registry."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from every_kind import KINDS, WITH_SOURCE, make_kind
from families import load
from test_guarantee import GREEDY, SAMPLED, same, watch

from soothsay import LLM, REGISTRY, DrafterError, Result
from soothsay.model.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

REPEATED = [*range(20, 32)] * 4
ASKED = [REPEATED, [5, 6, 7], [*REPEATED[:30], 9], [*range(60)], [3]]
MODES = [replace(mode, max_tokens=12) for mode in (GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY)]
CHUNKS = (7, 64, 512)
WITHOUT_KEYS = ("latent", "decays by dimension", "no attention")
REFUSED = {(kind, "assistant") for kind in WITHOUT_KEYS}  # it would read keys and values
HEADS = ("eagle", "eagle2", "eagle3", "mtp", "assistant", "medusa", "hydra", "block", "dflash", "peagle")
WITH_BLOCKS = {*HEADS, "redrafter"} - {"medusa", "hydra"}  # which read the last state alone
REFUSED |= {(kind, name) for kind in WITH_SOURCE for name in WITH_BLOCKS}
SELDOM = ("none", "auto", "ngram", "rest", "prompt-lookup")
"""Drafters that may have nothing to propose to these prompts."""


@dataclass(frozen=True)
class Kind:
    """A random model on disk, and its drafters."""

    name: str
    directory: Path
    drafters: dict[str, str]  # name -> specification

    @property
    def fitting(self) -> list[str]:
        """The drafters that can draft for it."""
        return [name for name in REGISTRY if (self.name, name) not in REFUSED]


@cache
def model_of(directory: Path, dtype: Any) -> Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a machine without fast bfloat16
        return load(directory, dtype)


@cache
def plain(directory: Path, dtype: str) -> list[Result]:
    """The answer to each prompt alone, without a drafter and without prefix caching."""
    llm = LLM(model_of(directory, dtype), drafter="none", kv_tokens=512, prefix_caching=False)
    return [llm.generate(ids, mode) for ids, mode in zip(ASKED, MODES, strict=True)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    directory = tmp_path_factory.mktemp("kind")
    return Kind(request.param, directory, make_kind(request.param, directory))


def assert_answers_stay(
    kind: Kind, dtype: str, drafters: Sequence[str], chunk: int, places: Sequence[int] = range(len(ASKED))
) -> None:
    """Answer prompts at once, with so little memory that requests are preempted, and prefix hits."""
    expected = [plain(kind.directory, dtype)[place] for place in places]
    asked, modes = [ASKED[place] for place in places], [MODES[place] for place in places]
    llm = LLM(model_of(kind.directory, dtype), drafter="none", kv_tokens=80, block_size=8, max_rows=chunk)
    requests = watch(llm)
    for name in drafters:
        results = llm.generate(asked, modes, drafter=kind.drafters[name])
        for result, one in zip(results, expected, strict=True):
            same(result, one)
        drafted = sum(result.stats.drafted for result in results)
        assert drafted > 0 or chunk == 1 or name in SELDOM, name
    assert chunk == 1 or sum(request.num_preemptions for request in requests) > 0
    # sources share their keys as wholes, and these here are all different
    assert chunk == 1 or kind.name in WITH_SOURCE or any(request.num_prefix_hits for request in requests)


def test_some_drafters_with_one_size_of_chunks(kind: Kind) -> None:
    """Kinds take turns: each drafter and each size is tested with every third one."""
    place = [*KINDS].index(kind.name) % len(CHUNKS)
    assert_answers_stay(kind, KINDS[kind.name][1], kind.fitting[place :: len(CHUNKS)], CHUNKS[place])


def test_chunks_of_one_token_where_nothing_is_drafted(kind: Kind) -> None:
    """The shorter prompts: each token takes a step."""
    name = next(name for name in ("mtp", "draft-model") if name in kind.fitting)
    assert_answers_stay(kind, KINDS[kind.name][1], [name], 1, places=(1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "auto"])
@pytest.mark.parametrize("chunk", [1, *CHUNKS])
def test_each_drafter_with_each_size_of_chunks(kind: Kind, chunk: int, dtype: str) -> None:
    assert_answers_stay(kind, dtype, kind.fitting, chunk)


def test_drafters_that_do_not_fit_are_refused(kind: Kind) -> None:
    llm = LLM(model_of(kind.directory, KINDS[kind.name][1]), drafter="none", kv_tokens=128)
    for _, name in (pair for pair in REFUSED if pair[0] == kind.name):
        with pytest.raises(DrafterError):
            llm.generate([1, 2, 3], GREEDY, drafter=kind.drafters[name])
