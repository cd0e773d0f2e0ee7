"""Make the models that tests serve. The engine's process imports these functions by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from soothsay import LLM, DraftTree, Request
from soothsay.drafters.base import NoDrafter, Target
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.lookup.suffix_matching import Suffix
from soothsay.model.timing.pass_times import PassTimes

STEP, EXIT, SCHEDULE, DRAFTER = range(300, 304)
"""First tokens of prompts. Each token makes a part of the engine fail after a few tokens of the answer."""

SLOW = 304
"""First token of a prompt whose answer takes minutes."""

KILL = 305
"""First token of a prompt that ends the engine's process before any token of the answer."""


def sibyl(**options: Any) -> LLM:
    """The bundled model."""
    torch.set_num_threads(1)
    return LLM("sibyl", **{"dtype": "int8", "drafter": "suffix", "kv_tokens": 8192, **options})


def steered(**options: Any) -> LLM:
    """The bundled model with a controller for which rows cost little, however busy the machine is."""

    def controller(target: Target) -> Controller:
        return Controller(target, [Suffix(target)], PassTimes([1, 64], [0], [[1.0, 2.0]]))

    return sibyl(drafter=controller, **options)


def killed(**_: Any) -> LLM:
    """Kill the process while it loads."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fragile(**options: Any) -> LLM:
    """The bundled model in an engine that fails or is slow, as the first token of a prompt says."""
    llm = sibyl(drafter=Spiteful, **options)
    model, scheduler = llm.engine.model, llm.engine.scheduler
    schedule = scheduler.schedule

    def fail_forward(*_: Any) -> None:
        alone = llm.engine.recovery.alone
        # in the middle of a step, after blocks were allocated and shared
        for request in scheduler.running if alone is None else [alone]:
            if _is_time(request, STEP):
                raise ValueError("/secret/path")
            if _is_time(request, EXIT):
                raise SystemExit(3)
            if request.tokens[0] == KILL:
                raise SystemExit(4)

    def fail_schedule(alone: Request | None = None) -> Any:
        taken = scheduler.waiting if alone is None else [alone]
        if any(request.tokens[0] == SCHEDULE for request in taken):
            raise RuntimeError("broken before anything runs")
        if any(request.tokens[0] == SLOW for request in scheduler.running):
            time.sleep(0.1)
        return schedule(alone)

    model.register_forward_pre_hook(fail_forward)
    scheduler.schedule = fail_schedule  # type: ignore[method-assign]
    return llm


def useless(**options: Any) -> LLM:
    """The bundled model with a drafter that always fails."""
    return sibyl(drafter=Useless, **options)


class Useless(NoDrafter):
    """Fails in `propose`."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        raise RuntimeError("/secret/path")


class Spiteful(NoDrafter):
    """Proposes nothing. Fails in `propose`, and then in `release`, if the prompt's first token says so."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        if any(_is_time(request, DRAFTER) for request in requests):
            raise RuntimeError("broken")
        return super().propose(requests)

    def release(self, request: Request) -> None:
        if request.tokens[0] == DRAFTER:
            raise RuntimeError("broken, too")


def _is_time(request: Request, what: int) -> bool:
    return bool(request.tokens[0] == what) and request.num_output >= 8
