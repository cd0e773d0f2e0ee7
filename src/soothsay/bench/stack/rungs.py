"""The contenders of `soothsay bench stack`: transformers in a process of its own, and our engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.core.params import SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.drafters.base import Drafter
from soothsay.errors import SoothsayError
from soothsay.llm import LLM

Ids = list[int]


class Contender(Protocol):
    """Answers prompts greedily, with a fixed number of tokens."""

    at_once: int  # prompts that it answers together

    def begin(self) -> None:
        """Forget the prompts of earlier runs. Called before each run; its time does not count."""

    def answer(self, prompts: Sequence[Ids], tokens: int) -> tuple[float, list[Ids]]:
        """Answer at most `at_once` prompts together. Returns the seconds, and the tokens of each answer."""


class Theirs:
    """transformers, one prompt at a time. Its process measures the time. See `Contender`."""

    at_once = 1

    def __init__(self, process: PeerProcess):
        self._process = process

    def begin(self) -> None:
        """See `Contender`. It remembers nothing."""

    def answer(self, prompts: Sequence[Ids], tokens: int) -> tuple[float, list[Ids]]:
        """See `Contender`."""
        (prompt,) = prompts
        seconds, answer = self._process.generate(prompt, tokens, "plain")
        return seconds, [answer]


class Ours:
    """Our engine. See `Contender`.

    The drafter forgets earlier prompts before each group. Each run has a tenant of its own, so that the
    prefix cache, if the engine has one, is empty when the run begins.

    Args:
        llm: the engine, without other requests.
        drafter: proposes for all requests.
        at_once: requests in a group.
    """

    def __init__(self, llm: LLM, drafter: Drafter, at_once: int = 1):
        self.at_once = at_once
        self._llm, self._drafter = llm, drafter
        self._runs = count()
        self.begin()

    def begin(self) -> None:
        """See `Contender`."""
        self._tenant = Tenant("bench stack", str(next(self._runs)))

    def answer(self, prompts: Sequence[Ids], tokens: int) -> tuple[float, list[Ids]]:
        """See `Contender`. Raises `SoothsayError` if the engine fails at a request."""
        llm, params = self._llm, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._drafter.reset()
        begin = time.perf_counter()
        requests = [
            request
            for prompt in prompts
            for request in llm.requests(prompt, params, drafter=self._drafter, tenant=self._tenant)
        ]
        try:
            for request in requests:
                llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()
        finally:  # also on Ctrl-C, no request may stay in the engine
            for request in requests:
                llm.engine.cancel(request)
        seconds = time.perf_counter() - begin
        for request in requests:
            if request.failure is not None:
                raise SoothsayError(f"the engine failed at a request: {request.failure}") from request.failure
        return seconds, [request.tokens[request.num_prompt :].tolist() for request in requests]
