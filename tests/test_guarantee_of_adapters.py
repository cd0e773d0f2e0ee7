"""The guarantee where requests of a batch have different LoRA adapters, or none.

Tokens and bits are those of each request alone: by plain decoding, without prefix caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapter_of
from every_drafter import resolve
from slow import distinct
from test_guarantee import GREEDY as LONGER
from test_guarantee import PROMPTS, SAMPLED, preempt_often, same, watch

from soothsay import LLM, Result, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.tenant import Tenant, prefix_digests
from soothsay.model.weights.hub import bundled_path

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

DTYPES = distinct("bfloat16", "int4", "float32")
GREEDY = replace(LONGER, max_tokens=10)
HOT = replace(SAMPLED, max_tokens=10, top_p=1.0)
OWN = [None, "a", "b"]
DRAFTERS = [
    *("suffix", "eagle3", "mtp", "draft-model", "lookahead", "layer-skip(exit=3, width=2, branch=3)"),
    *("prompt-lookup(min_ngram=1, num_matches=5, num_tokens=4)", "eagle3(model=UNTRAINED)"),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that change most tokens."""
    folder, sibyl = tmp_path_factory.mktemp("adapters"), bundled_path("sibyl")
    more = {"a": {"rank": 8}, "b": {"rank": 5, "targets": ("q_proj", "v_proj", "down_proj")}}
    return {name: adapter_of(sibyl, folder / name, size=0.3, **given) for name, given in more.items()}


@cache
def loaded(dtype: str, a: Path, b: Path) -> LLM:
    options: Any = {"dtype": dtype, "drafter": "none", "kv_tokens": 256}
    return LLM("sibyl", adapters={"a": a, "b": b}, **options)


def make(dtype: str, paths: dict[str, Path], **options: Any) -> LLM:
    """The model with both adapters, in an engine of its own. It shares the weights with the others."""
    model = loaded(dtype, paths["a"], paths["b"]).model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("soothsay.llm.load_model", lambda *_, **__: model)
        kept = model.own.adapters
        made = LLM("sibyl", dtype=dtype, drafter="none", **{"kv_tokens": 8192, **options})
        model.own.adapters = kept
    return made


def asked(llm: LLM) -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    """Two prompts, each by each adapter and by the model alone, at T = 0 and at T = 1."""
    ids = [llm.chat_prompt(PROMPTS[place]) for place in (3, 4)]
    each = [(prompt, params, own) for prompt in ids for params in (GREEDY, HOT) for own in OWN]
    prompts, params, adapters = (list(part) for part in zip(*each, strict=True))
    return prompts, params, adapters


_ALONE: dict[str, list[Result]] = {}


def alone(dtype: str, paths: dict[str, Path]) -> list[Result]:
    """Each request alone."""
    if dtype not in _ALONE:
        llm = make(dtype, paths, prefix_caching=False)
        each = zip(*asked(llm), strict=True)
        _ALONE[dtype] = [llm.generate(prompt, params, adapter=own) for prompt, params, own in each]
    return _ALONE[dtype]


def all_same(results: Sequence[Result], expected: Sequence[Result]) -> None:
    for result, own in zip(results, expected, strict=True):
        same(result, own)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_change_answers(dtype: str, paths: dict[str, Path]) -> None:
    texts = [tuple(result.token_ids) for result in alone(dtype, paths)]
    for place in range(0, len(texts), len(OWN)):
        assert len({*texts[place : place + len(OWN)]}) == len(OWN)


@pytest.mark.parametrize(
    "place",
    [pytest.param(i, id=name, marks=[pytest.mark.slow] * (i > 3)) for i, name in enumerate(DRAFTERS)],
)
def test_mixed_batches(place: int, paths: dict[str, Path]) -> None:
    """Again after prefix hits; then in small chunks with little memory, with requests that are preempted."""
    dtype, drafter = DTYPES[place % len(DTYPES)], resolve(DRAFTERS[place])
    llm, expected = make(dtype, paths), alone(dtype, paths)
    prompts, params, adapters = asked(llm)
    requests = watch(llm)
    for _ in range(2):
        all_same(llm.generate(prompts, params, drafter=drafter, adapter=adapters), expected)
    assert sum(request.num_prefix_hits > 0 for request in requests[len(prompts) :]) == len(prompts)
    longest = max(map(len, prompts)) + (GREEDY.max_tokens or 0)
    llm = make(dtype, paths, kv_tokens=longest + 100, block_size=8, max_rows=24)
    requests = watch(llm)
    preempt_often(llm)
    all_same(llm.generate(prompts, params, drafter=drafter, adapter=adapters), expected)
    assert sum(request.num_preemptions for request in requests) >= 3


def test_all_drafters_in_one_batch(paths: dict[str, Path]) -> None:
    llm, expected = make("float32", paths), alone("float32", paths)
    prompts, params, adapters = asked(llm)
    drafters = [resolve(DRAFTERS[place % len(DRAFTERS)]) for place in range(len(prompts))]
    all_same(llm.generate(prompts, params, drafter=drafters, adapter=adapters), expected)


def test_no_adapter_reads_keys_of_another_one(paths: dict[str, Path]) -> None:
    llm = make("float32", paths)
    requests, [prompt, *_] = watch(llm), asked(llm)[0]
    for own in (*OWN, *OWN):
        llm.generate(prompt, GREEDY, adapter=own)
    hits = [request.num_prefix_hits for request in requests]
    assert hits[:3] == [0, 0, 0]
    assert min(hits[3:]) > len(prompt) - 17
    digests = {tuple(prefix_digests(Tenant(), requests[0].tokens, 16, own)) for own in OWN}
    assert len(digests) == len(OWN)
    for request in requests:  # the server's router knows engines' blocks by the same digests
        own = prefix_digests(request.tenant, request.tokens, 16, request.adapter)
        assert [request.digest(block) for block in range(request.num_full_blocks)] == [*own]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_an_adapter_have_the_bits_of_recorded_passes(dtype: str, paths: dict[str, Path]) -> None:
    model, tokens = make(dtype, paths).model, torch.arange(7, 20).numpy()
    with torch.inference_mode():
        expected = model.run(model.pack([Rows(tokens, 0)]))[0]
        together = model.run(model.pack([Rows(tokens, 0, adapter="a"), Rows(tokens, 0)]))[0]
        by_adapter = model.run(model.pack([Rows(tokens, 0, adapter="a")]))[0]
        backwards = [Rows(tokens, 0), Rows(tokens[:5], 0, adapter="b"), Rows(tokens, 0, adapter="a")]
        last = model.run(model.pack(backwards))[0][-len(tokens) :]
    assert torch.equal(together[len(tokens) :], expected)
    assert torch.equal(together[: len(tokens)], by_adapter)
    assert torch.equal(last, by_adapter)
    assert not torch.equal(by_adapter, expected)
