"""The guarantee on models with states: drafters, chunks, batches, preemption and prefix hits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import load, random_oracle, random_tokens
from slow import mostly_slow
from test_guarantee import GREEDY, SAMPLED, same, watch

from soothsay import LLM, DrafterError, Result
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.new_heads import medusa
from soothsay.train.sequences import TrainingKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

REPEATED = [*range(20, 32)] * 4
ASKED = [REPEATED, [5, 6, 7], [*REPEATED[:30], 9], [*range(60)], [3]]
MODES = [replace(mode, max_tokens=12) for mode in (GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY)]
DRAFTERS = ("suffix", "auto", "layer-skip(exit=3)")  # test_every_kind.py has all


FAMILIES = (
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "jamba",
    "lfm2",
    "granite4_hybrid",
    "falcon_h1",
    "nemotron_h",
)
DTYPES = ("float32", "int8", "bfloat16", "int4")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    random_oracle(request.param, max_position_embeddings=256).save_pretrained(made)
    return made


@cache
def loaded(directory: Path, dtype: Any = "float32") -> Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a machine without fast bfloat16
        return load(directory, dtype)


@cache
def plain(model: Transformer) -> list[Result]:
    return one_by_one(model, ASKED)


def one_by_one(model: Transformer, asked: Sequence[list[int]]) -> list[Result]:
    llm = LLM(model, drafter="none", kv_tokens=512, prefix_caching=False)
    return [llm.generate(ids, mode) for ids, mode in zip(asked, MODES, strict=False)]


def all_same(results: Sequence[Result], expected: Sequence[Result]) -> None:
    for result, reference in zip(results, expected, strict=True):
        same(result, reference)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafters_in_small_memory_in_each_format(directory: Path, dtype: str) -> None:
    assert_answers_stay(directory, dtype)


def test_drafters_in_small_memory(directory: Path, request: pytest.FixtureRequest) -> None:
    """Formats take turns."""
    place = FAMILIES.index(request.node.callspec.params["directory"])
    assert_answers_stay(directory, DTYPES[place % len(DTYPES)])


def assert_answers_stay(directory: Path, dtype: str) -> None:
    """Requests are preempted, and later ones go on from snapshots of the first ones."""
    if not (directory / "medusa").exists():
        trained = load_model(open_checkpoint(directory), "float32", kernels=TrainingKernels())
        write_head(medusa(trained, heads=2), directory / "medusa", str(directory))
    model = loaded(directory, dtype)
    expected = plain(model)
    llm = LLM(model, drafter="none", kv_tokens=80, block_size=8, max_rows=40)
    requests = watch(llm)
    for drafter in (*DRAFTERS, f"medusa(model={directory / 'medusa'})"):
        results = llm.generate(ASKED, MODES, drafter=drafter)
        all_same(results, expected)
        drafted = sum(result.stats.drafted for result in results)
        assert drafted > 0 or drafter == "auto", drafter  # which may find that drafts do not pay here
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_prefix_hits > 0 for request in requests) >= 3
    assert all(request.state is None for request in requests)


@pytest.mark.parametrize("max_rows", mostly_slow([7, 1, 64, 512]))
def test_chunks_of_prompts(directory: Path, max_rows: int) -> None:
    model = loaded(directory)
    expected = plain(model)
    for drafter in ("none", "suffix") if max_rows > 1 else ("none",):  # one row has no room for drafts
        llm = LLM(model, drafter=drafter, kv_tokens=1024, block_size=8, max_rows=max_rows)
        all_same([llm.generate(ASKED[0], MODES[0])], expected[:1])
        all_same(llm.generate(ASKED, MODES), expected)


def test_conversations_go_on_from_snapshots(directory: Path) -> None:
    """The same prompt, the next turn, and a third request with the same beginning hit; bits stay."""
    model, size = loaded(directory), 8
    llm = LLM(model, drafter="suffix", kv_tokens=1024, block_size=size)
    requests = watch(llm)
    first = ASKED[3]
    answer = llm.generate(first, MODES[0]).token_ids
    more = [*first, *answer, 7, 8, 9]
    system = first[:24]
    asked = [first, more, [*system, *range(40, 60)], [*system, *range(50, 80)]]
    modes = [MODES[0], *MODES[:3]]
    plainly = LLM(model, drafter="none", kv_tokens=512, prefix_caching=False)
    for ids, mode in zip(asked, modes, strict=True):
        same(llm.generate(ids, mode), plainly.generate(ids, mode))
    hits = [request.num_prefix_hits for request in requests[1:]]
    ends = (len(first) - 1) // size * size, (len(first) + len(answer) - 1) // size * size
    assert hits == [ends[0], ends[1], 0, len(system)]  # the second one that parts there finds the snapshot


def test_requests_together_wait_for_what_they_share(directory: Path) -> None:
    model = loaded(directory)
    (system,) = random_tokens(np.random.default_rng(0), 40)
    asked = [[*system, *own] for own in ([1, 2, 3], [4, 5], [6] * 20)]
    llm = LLM(model, drafter="suffix", kv_tokens=1024, block_size=8)
    requests = watch(llm)
    all_same(llm.generate(asked, MODES[:3]), one_by_one(model, asked))
    assert [request.num_prefix_hits for request in requests] == [0, 40, 40]


def test_a_budget_of_snapshots(directory: Path) -> None:
    """None: nothing is shared. One: the latest is kept."""
    model = loaded(directory)
    assert model.spec.states
    state = model.spec.state_bytes(4)
    for copies, hits in ((0, False), (1, True)):
        llm = LLM(model, drafter="none", kv_tokens=1024, block_size=8, snapshot_bytes=copies * state)
        requests = watch(llm)
        for _ in range(2):
            same(llm.generate(ASKED[3], replace(MODES[0], max_tokens=2)), plainly_short(model))
        assert (requests[1].num_prefix_hits > 0) == hits


def plainly_short(model: Transformer) -> Result:
    llm = LLM(model, drafter="none", kv_tokens=512, prefix_caching=False)
    return llm.generate(ASKED[3], replace(MODES[0], max_tokens=2))


def test_a_draft_model_with_states_is_refused(directory: Path) -> None:
    llm = LLM(loaded(directory), drafter="none", kv_tokens=512)
    with pytest.raises(DrafterError, match="keeps states"):
        llm.generate([1, 2, 3], GREEDY, drafter=f"draft-model(model={directory})")
