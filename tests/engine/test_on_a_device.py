"""Every drafter beside a model on a device, which refuses tensors of the host and has its own sampling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from counting_device import DEVICE, CountingDevice, OnDevice
from every_drafter import DRAFTERS, resolve
from every_kind import KINDS, WITH_SOURCE, make_kind
from torch import Tensor
from torch.utils._pytree import tree_iter

from soothsay import LLM, Grammar, SamplingParams
from soothsay.core.sampling_ops import SamplingOps
from soothsay.model.ops.kernels import StockKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

PROMPTS = [[5, 6, 7, 8, 9] * 5, [9, 10, 11] * 7, [*range(40, 70)]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=7)
CHANGED = replace(
    SAMPLED,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    logit_bias={11: 2.0},
    bad_words=["the", "a man"],
    logprobs=2,
    prompt_logprobs=2,
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMAR = replace(SAMPLED, grammar=Grammar.json_schema(SCHEMA), ignore_eos=False)
DRAWN = replace(SAMPLED, top_p=1.0, verifier="rejection")
FEW = ["block(model=UNTRAINED)", "suffix + mtp + recycling"]
"""Drafters with each kind of work: node by node, level by level, on the host, several."""


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        for x in tree_iter(args):
            assert not isinstance(x, Tensor) or isinstance(x, OnDevice), f"a host's tensor in {function}"
        return function(*args)

    return call


class DeviceSampling(SamplingOps):
    """Kernels of a device read no tensor of the host."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return refusing(found) if name in {"gumbel", "argmax", "largest", "race", "logprobs"} else found


class DeviceKernels(StockKernels):
    sampling = DeviceSampling()


@pytest.fixture(autouse=True)
def _kernels_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.model.kernel_sets.best_kernels", lambda *_: DeviceKernels())


def on_device(path: str | Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"kv_tokens": 2048, "drafter": "none"} | options
    return LLM(str(path), dtype="float32", device=str(DEVICE), **sizes)


def check(llm: LLM, drafter: str, device: CountingDevice) -> None:
    """Assert that a drafter says what plain decoding says, without waiting for each node."""
    params = [GREEDY, SAMPLED, *([CHANGED, GRAMMAR] if llm.tokenizer else [])]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    plain = [answer.token_ids for answer in llm.generate(prompts, params)]
    before = device.waits
    answers = llm.generate(prompts, params, drafter=drafter)
    steps = sum(answer.stats.steps for answer in answers)
    assert [answer.token_ids for answer in answers] == plain
    assert device.waits - before <= 16 * steps
    llm.generate(PROMPTS, DRAWN, drafter=drafter)


@pytest.mark.parametrize(
    "drafter", [*FEW, *(pytest.param(d, marks=pytest.mark.slow) for d in DRAFTERS if d not in FEW)]
)
def test_drafters_beside_a_model_on_a_device(drafter: str) -> None:
    spec = resolve(drafter)
    with CountingDevice() as device:
        check(on_device("sibyl"), spec, device)


@pytest.mark.slow
def test_a_preempted_request_and_a_prefix_hit_on_a_device() -> None:
    params = replace(SAMPLED, max_tokens=40)
    with CountingDevice():
        whole = [answer.token_ids for answer in on_device("sibyl").generate(PROMPTS, params)]
        llm = on_device("sibyl", kv_tokens=144, max_rows=16)
        for _ in range(2):
            assert [answer.token_ids for answer in llm.generate(PROMPTS, params, drafter="mtp")] == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models_on_a_device(kind: str, tmp_path: Path) -> None:
    """Their operations are PyTorch's own there. Heads and draft models run beside them."""
    specs = make_kind(kind, tmp_path)
    with CountingDevice() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # untrained
        llm = on_device(tmp_path)
        for drafter in ("medusa" if kind in WITH_SOURCE else "eagle3", "auto"):
            check(llm, specs[drafter], device)
