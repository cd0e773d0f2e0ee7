"""How often the host waits for a device in a step, and how often it copies something to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from counting_device import DEVICE, CountingDevice, counted_steps
from tiny import TINY, adapted

from soothsay import Drafter, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.core.request import Request
from soothsay.drafters.heads.eagle import Eagle2, EagleConfig, EagleHead
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.registry import build_drafter
from soothsay.engine.engine import Engine
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer

LEVELS = 3
"""Levels of grown trees."""


def draft_model(target: Target) -> Drafter:
    return DraftModel(target, model(1).to(target.model.device), LEVELS, 2, 2)


def eagle(target: Target) -> Drafter:
    torch.manual_seed(2)
    config = EagleConfig(adapted(TINY, num_layers=1, windows=(None,)), True, 2)
    head = EagleHead(config, StockKernels()).requires_grad_(False)
    return Eagle2(target, head, depth=LEVELS, width=2)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda target: build_drafter("none", target),
    "suffix": lambda target: build_drafter("suffix", target),
    "draft-model": draft_model,
    "eagle2": eagle,
}


def model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(TINY).eval().requires_grad_(False)


def answers(
    name: str, params: SamplingParams, count: int, device: CountingDevice | None
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The tokens of some requests, and the waits and copies of each step."""
    target = model(0)
    with device or nullcontext():
        if device is not None:
            target.to(DEVICE)
        engine = Engine(target, None, EngineConfig(kv_tokens=2048, max_context=256))
        drafter, steps = DRAFTERS[name](engine.target), list[tuple[int, int]]()
        requests = [
            Request([*range(5, 10)] * 3 + [5] * i, params, seed=i, limit=30, drafter=drafter)
            for i in range(count)
        ]
        for request in requests:
            engine.add(request)
        steps += counted_steps(engine, device or CountingDevice())
    assert [request.failure for request in requests] == [None] * count
    return [request.tokens.tolist() for request in requests], steps


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("name", "params", "waits", "copies"),
    [
        ("none", {"temperature": 0}, 1, 1),
        ("none", {}, 1, 2),
        ("none", {"verifier": "rejection"}, 1, 2),
        ("none", {"top_p": 0.9}, 1, 2),
        ("none", {"logprobs": 2}, 1, 3),
        ("suffix", {"temperature": 0}, 1, 2),
        ("suffix", {}, 1, 3),
        ("suffix", {"verifier": "rejection"}, 1, 3),
        ("suffix", {"top_p": 0.9, "repetition_penalty": 1.2, "allowed_token_ids": range(60)}, 1, 3),
        ("suffix", {"logit_bias": {3: 2.0}, "frequency_penalty": 0.3, "top_k": 9}, 1, 3),
        ("suffix", {"logprobs": 0, "presence_penalty": 0.5}, 1, 4),
        ("draft-model", {"temperature": 0}, 1 + LEVELS, 3 + 2 * LEVELS),
        ("draft-model", {}, 1 + LEVELS, 4 + 3 * LEVELS),
        ("draft-model", {"verifier": "rejection"}, 1 + 2 * LEVELS, 4 + 3 * LEVELS),
        ("eagle2", {"temperature": 0}, 1 + LEVELS, 5 + 2 * LEVELS),
        ("eagle2", {}, 1 + LEVELS, 6 + 3 * LEVELS),
    ],
)
def test_a_step_waits_once_and_once_a_level(
    name: str, params: dict[str, Any], waits: int, copies: int, count: int
) -> None:
    device, asked = CountingDevice(), SamplingParams(**{"seed": 4, **params})
    tokens, steps = answers(name, asked, count, device)
    assert tokens == answers(name, asked, count, None)[0], "a device waits less, and says the same"
    assert max(step[0] for step in steps) <= waits
    assert max(step[1] for step in steps) <= copies


def test_what_a_device_would_refuse_fails_here_too() -> None:
    device = CountingDevice()
    with device:
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises(RuntimeError, match="address"):
            there.data_ptr()
        assert (there + here.to(DEVICE)).tolist() == [2.0, 2.0, 2.0]
        assert float(there[[0, 2]].sum()) == 2.0
        assert (device.waits, device.copies) == (4, 2), "the host waits for both copies as well"
