"""The guarantee across numbers of threads: another number changes no token and no bit, in any kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from every_drafter import DRAFTERS, resolve
from every_kind import KINDS, WITH_SOURCE, make_kind
from test_every_kind import ASKED, MODES
from test_guarantee import GREEDY, MIXED, PENALIZED, SAMPLED, prompts, same

from soothsay import LLM, Result, SamplingParams
from soothsay.model.native import library

SETS = [name for name in ("stock", *library.VARIANTS) if not library._problem(name)]
NATIVE = [name for name in SETS if name != "stock"]
COUNTS = (2, 3, 4, 8, 16)
STOCK_ALONE = "convolutions", *WITH_SOURCE  # random models that no native set fits

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it


@pytest.fixture(autouse=True)
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels have more threads than there are cores, which is slower and no less correct."""
    monkeypatch.setattr(library, "granted_processors", lambda: max(COUNTS))
    yield
    torch.set_num_threads(1)


def loaded(model: str | Path, name: str, **options: Any) -> LLM:
    options = {"drafter": "none", "kv_tokens": 4096, "prefix_caching": False, **options}
    llm = LLM(model, kernels=name, **options)
    assert name == "stock" or vars(llm.model.kernels)["_granted"] == max(COUNTS)
    return llm


def alone(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> list[Result]:
    """Answer each prompt alone and plainly, in one thread."""
    torch.set_num_threads(1)
    return [llm.generate(ids, own) for ids, own in zip(asked, params, strict=True)]


def with_a_long_one() -> list[list[int]]:
    """Prompts of `test_guarantee`, and one so long that threads share its keys."""
    return [*prompts(), (prompts()[7] * 20)[:600]]


@pytest.mark.parametrize("name", NATIVE)
def test_another_number_of_threads_changes_no_bit(name: str) -> None:
    llm, asked = loaded("sibyl", name, dtype="int8"), with_a_long_one()[-3:]
    params = [replace(one, max_tokens=6, min_tokens=0) for one in (PENALIZED, GREEDY, SAMPLED)]
    expected = alone(llm, asked, params)
    for count in COUNTS:
        torch.set_num_threads(count)
        found = llm.generate(asked, params, drafter=["mtp", "prompt-lookup", "layer-skip"])
        for result, plain in zip(found, expected, strict=True):
            same(result, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", SETS)
def test_every_drafter(name: str, dtype: str, kv_dtype: str) -> None:
    """In mixed batches of nine, each with another number of threads."""
    llm, asked, params = (
        loaded("sibyl", name, dtype=dtype, kv_dtype=kv_dtype),
        with_a_long_one(),
        [*MIXED, SAMPLED],
    )
    expected = alone(llm, asked, params)
    for count, first in zip(cycle(COUNTS), range(0, len(DRAFTERS), len(asked))):
        drafters = [resolve(DRAFTERS[(first + i) % len(DRAFTERS)]) for i in range(len(asked))]
        torch.set_num_threads(count)
        for result, plain in zip(llm.generate(asked, params, drafter=drafters), expected, strict=True):
            same(result, plain)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A random model with one kind of layers, and its type of weights."""
    directory = tmp_path_factory.mktemp("kind")
    make_kind(request.param, directory)
    return directory, KINDS[request.param][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in (["stock"] if kind in STOCK_ALONE else SETS)],
    indirect=["kind"],
)
@pytest.mark.filterwarnings("ignore:.*bfloat16:UserWarning")
def test_every_kind_of_layer(kind: tuple[Path, str], name: str) -> None:
    llm = loaded(kind[0], name, dtype=kind[1], kv_tokens=512)
    expected = alone(llm, ASKED, MODES)
    for count in COUNTS:
        torch.set_num_threads(count)
        for result, plain in zip(llm.generate(ASKED, MODES, drafter="suffix"), expected, strict=True):
            same(result, plain)
