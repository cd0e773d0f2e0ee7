"""The engine on the kernels of a GPU, in the interpreter: equal tokens and bits, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_models import PROMPT, loaded, serving, write_llama

from soothsay import LLM, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.tree import DraftTree
from soothsay.model.gpu import gpu_passes
from soothsay.model.gpu.gpu_passes import GraphRecorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def check(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> None:
    """Assert that drafters, neighbours and a prefix hit change no token."""
    alone = llm.generate(prompt, params).token_ids
    drafted = llm.generate(prompt, params, drafter="prompt-lookup")
    assert drafted.token_ids == alone
    assert drafted.stats.drafted > 0
    mixed = llm.generate([prompt, [3, 4, 5], prompt[4:]], params, drafter="suffix")
    assert mixed[0].token_ids == alone


def test_answers_do_not_depend_on_drafts(folder: Path) -> None:
    check(serving(loaded(folder)), SamplingParams(temperature=0, max_tokens=4), PROMPT[:10])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=10),
        SamplingParams(temperature=1, max_tokens=10, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_tokens=10, seed=4),
        SamplingParams(
            temperature=0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=10, logprobs=2
        ),
    ],
    ids=["greedy", "sampled", "a nucleus", "penalized"],
)
def test_answers_in_all_types(dtype: str, params: SamplingParams, folder: Path) -> None:
    check(serving(loaded(folder, dtype)), params)


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_equal_tokens(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = [PROMPT, [3, 4, 5] * 5, [8, 2] * 7]
    whole = [serving(loaded(folder)).generate(prompt, params).token_ids for prompt in prompts]
    llm = serving(loaded(folder), kv_tokens=96, max_rows=16)
    assert [answer.token_ids for answer in llm.generate(prompts, params, drafter="suffix")] == whole


@torch.inference_mode()
def test_a_recorded_pass_has_the_bits_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, trees and single tokens, of one request and of two, by turns."""
    folder = write_llama(tmp_path, layers=1)
    monkeypatch.setattr(gpu_passes, "USES", 1)
    plain, again = loaded(folder), loaded(folder, recorded=True)
    pools = [model.new_cache(16, 16) for model in (plain, again)]
    tables = np.arange(8), np.arange(8, 16)
    tree = DraftTree(PROMPT[-1])
    tree.extend([9, 7, 3])
    tree.extend([9, 1])
    tree.extend([2])

    def rows(begin: int, end: int, table: int, tree: DraftTree | None) -> Rows:
        return Rows(np.array(PROMPT[begin:end]), begin, tables[table], tree)

    last = DraftTree(PROMPT[-1])
    passes = [
        [rows(0, 17, 0, None), rows(0, 5, 1, None)],
        [rows(17, 18, 0, tree)],
        [rows(17, 18, 0, last), rows(5, 17, 1, None)],
        [rows(17, 18, 1, tree), rows(17, 18, 0, tree)],
        [rows(17, 18, 0, last)],
    ]
    for requests in passes:
        (hidden, _, logits), (other, _, others) = (
            model.run(model.pack(requests, 16), pool)
            for model, pool in zip((plain, again), pools, strict=True)
        )
        assert torch.equal(hidden, other)
        assert torch.equal(logits, others)
        assert not logits.isnan().any()
    for one, other in zip(*(pool.layers for pool in pools), strict=True):
        assert torch.equal(one, other)
    passes_of = again.kernels.passes  # type: ignore[attr-defined]
    assert len(passes_of._known[pools[1]]) > 1


@pytest.mark.slow
def test_recorded_passes_answer_as_others(folder: Path) -> None:
    params = SamplingParams(temperature=1, max_tokens=24, seed=5)
    alone = serving(loaded(folder)).generate(PROMPT, params).token_ids
    llm = serving(loaded(folder, recorded=True))
    for drafter in ("none", "prompt-lookup", "suffix"):
        assert llm.generate(PROMPT, params, drafter=drafter).token_ids == alone


def test_a_pass_runs_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are loaded then, which is not possible while others are recorded."""
    events = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        events.append("begin")
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    GraphRecorder()(lambda: events.append("run"))  # type: ignore[arg-type, func-returns-value, return-value]
    assert events == ["run", "begin", "run"]
