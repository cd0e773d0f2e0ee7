"""What tests have served: made in a process of its own, so by functions that can be imported there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from soothsay import LLM, DraftTree, Request
from soothsay.drafters.base import NoDrafter

STEP, EXIT, SCHEDULE, DRAFTER = range(300, 304)
"""Tokens: what fails once an answer to a prompt that begins with one of them has a few tokens of its own."""

SLOW = 304
"""A token: an answer to a prompt that begins with it takes minutes."""


def sibyl(**options: Any) -> LLM:
    """The bundled model."""
    torch.set_num_threads(1)
    return LLM("sibyl", **{"dtype": "float32", "drafter": "suffix", "kv_tokens": 8192, **options})


def killed(**_: Any) -> LLM:
    """No model at all: the process does not live to have one."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fragile(**options: Any) -> LLM:
    """The bundled model in an engine that fails, or is slow, where a request says so."""
    llm = sibyl(drafter=Spiteful, **options)
    engine, scheduler = llm.engine, llm.engine.scheduler
    forward, schedule = engine._forward, scheduler.next

    def fail_forward(shares: Sequence[Any], trees: Sequence[DraftTree | None]) -> Any:
        for share in shares:  # in the middle of a step, when blocks are taken and shared
            if _is_time(share.request, STEP):
                raise ValueError("/secret/path")
            if _is_time(share.request, EXIT):
                raise SystemExit(3)
        return forward(shares, trees)

    def fail_schedule() -> Any:
        if any(request.tokens[0] == SCHEDULE for request in scheduler.waiting):
            raise RuntimeError("broken before anything runs")
        if any(request.tokens[0] == SLOW for request in scheduler.running):
            time.sleep(0.1)
        return schedule()

    engine._forward = fail_forward  # type: ignore[method-assign]
    scheduler.next = fail_schedule  # type: ignore[method-assign]
    return llm


class Spiteful(NoDrafter):
    """Guesses nothing; if its request says so, fails at that, and then cannot forget the request either."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        if any(_is_time(request, DRAFTER) for request in requests):
            raise RuntimeError("broken")
        return super().propose(requests)

    def release(self, request: Request) -> None:
        if request.tokens[0] == DRAFTER:
            raise RuntimeError("broken, too")


def _is_time(request: Request, what: int) -> bool:
    return bool(request.tokens[0] == what) and request.num_output >= 8
