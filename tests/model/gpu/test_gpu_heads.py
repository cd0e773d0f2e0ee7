"""EAGLE-3 with a grown tree on the kernels of a GPU, in the interpreter: it changes no token and no bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_models import PROMPT, VOCAB, loaded, serving, write_llama

from soothsay import LLM, Result, SamplingParams
from soothsay.core.answer import TokenLogprobs
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.model.gpu import gpu_passes
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train import new_heads
from soothsay.train.examples import Example
from soothsay.train.sequences import TrainingKernels

OTHERS = [[3, 4, 5], PROMPT[4:]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
PARAMS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.3, seed=3),
    "a nucleus": replace(GREEDY, temperature=0.8, top_p=0.9, top_k=40, seed=4),
    "penalized": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={9: 2.0}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with habits, and heads that begin with what its own answers show."""
    path = write_llama(tmp_path_factory.mktemp("llama"), habit=2.0)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB, (48, 6), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    fast = LLM(load_model(open_checkpoint(path), "float32"), drafter="none", kv_tokens=4096)
    texts = [
        prompt + answer.token_ids
        for prompt, answer in zip(prompts, fast.generate(prompts, params), strict=True)
    ]
    examples = [Example(np.array(text), np.arange(len(text)) > 5) for text in texts]
    twin = load_model(open_checkpoint(path), "float32", kernels=TrainingKernels())
    write_head(new_heads.eagle3(twin, examples, range(VOCAB), join=True), path / "eagle3", str(path))
    return path


def grown(folder: Path) -> str:
    return f"eagle3(model={folder / 'eagle3'}, depth=2, width=2, branch=3)"


def bits(answer: Result) -> tuple[list[int], list[TokenLogprobs] | None]:
    return answer.token_ids, answer.logprobs


def check(llm: LLM, params: SamplingParams, drafter: str) -> None:
    """Assert that a drafter, neighbours and a prefix hit change no bit, and that some guesses were right."""
    alone = llm.generate(PROMPT, params)
    drafted = llm.generate(PROMPT, params, drafter=drafter)
    assert bits(drafted) == bits(alone)
    assert drafted.stats.accepted > 0
    again = llm.generate([PROMPT, *OTHERS], params, drafter=[drafter, drafter, "suffix"])
    assert bits(again[0]) == bits(alone)
    assert bits(again[1]) == bits(llm.generate(OTHERS[0], params))


def test_a_grown_tree_changes_no_bit(folder: Path) -> None:
    llm, params = serving(loaded(folder)), replace(GREEDY, max_tokens=4)
    alone = llm.generate(PROMPT[:5], params)
    drafted = llm.generate(PROMPT[:5], params, drafter=grown(folder))
    assert bits(drafted) == bits(alone)
    assert drafted.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS.values(), ids=[*PARAMS])
def test_eagle3_changes_no_bit(params: SamplingParams, folder: Path) -> None:
    check(serving(loaded(folder)), params, grown(folder))


@pytest.mark.slow
def test_eagle3_in_integers(folder: Path) -> None:
    check(serving(loaded(folder, "int8")), PARAMS["sampled"], grown(folder))


@pytest.mark.slow
def test_eagle3_beside_recorded_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated pass overwrites its outputs, so features are kept by then. Passes of the head repeat too."""
    monkeypatch.setattr(gpu_passes, "USES", 1)
    plain, llm = serving(loaded(folder)), serving(loaded(folder, recorded=True))
    for params in (GREEDY, PARAMS["sampled"]):
        assert bits(llm.generate(PROMPT, params, drafter=grown(folder))) == bits(
            plain.generate(PROMPT, params)
        )


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_its_head(folder: Path) -> None:
    prompts, params = [PROMPT, [3, 4, 5] * 5], replace(GREEDY, max_tokens=16)
    llm = serving(loaded(folder))
    whole = [llm.generate(prompt, params).token_ids for prompt in prompts]
    llm = serving(loaded(folder), kv_tokens=64, max_rows=16)
    requests = [*chain(*(llm.requests(prompt, params, drafter=grown(folder)) for prompt in prompts))]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.tokens[request.num_prompt :].tolist() for request in requests] == whole
    assert any(request.num_preemptions for request in requests)
