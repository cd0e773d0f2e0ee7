"""Whoever answers questions and is timed: a drafter on our engine here, a server in `bench.endpoint`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from soothsay.drafters import Drafter, Observation
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.llm import LLM
from soothsay.tokenizer import Message


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn of a question, ready to be answered."""

    messages: tuple[Message, ...]
    prompt: list[int]  # token ids of the messages
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said."""

    token_ids: list[int]  # an end token included
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender took to answer some turns together. Times are in seconds."""

    answers: int
    different: int | None  # of them, from plain decoding's: must be 0. None: they cannot be compared
    tokens: int  # raw token ids; none behind an end token
    seconds: float  # until the last answer's end
    prefill: float  # of them, until each had its first token
    ahead: int  # tokens that were there by then
    cpu: float = 0.0  # of `seconds`, those in which the machine did not do something else
    draft: float = 0.0  # behind prefill, in the drafter
    verify: float = 0.0  # behind prefill, between the drafter's guesses and the verdict on them
    steps: int = 0  # passes that gave tokens, each answer's counted
    first: int = 0  # tokens of each answer's first step, which reads the prompt
    drafted: int = 0  # nodes verified, roots not counted
    accepted_at: list[int] = field(default_factory=list)  # steps that accepted as deep as this, or deeper


class Contender(Protocol):
    """Answers several turns at once."""

    name: str

    def reset(self) -> None:
        """Forget what was learnt from questions before."""

    def answer(self, asked: Sequence[Asked]) -> tuple[Run, list[Answer] | None]:
        """Answer and take the time; the answers come along if they can be compared with ours.

        `Run.different` is yet to be found.
        """


class Timed(Drafter):
    """Guesses as another drafter does, and takes the time."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.taps, self.max_nodes = drafter, drafter.taps, drafter.max_nodes
        self.restart()

    def restart(self) -> None:
        """Begin to count."""
        self.draft = self.verify = 0.0
        self._proposed: float | None = None

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The other's guesses."""
        begin = time.perf_counter()
        trees = self.drafter.propose(requests)
        self._proposed = time.perf_counter()
        self.draft += self._proposed - begin
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Show them to the other."""
        begin = time.perf_counter()
        if self._proposed is not None:  # else it was a piece of a prompt
            self.verify += begin - self._proposed
        self._proposed = None
        self.drafter.observe(observations)
        self.draft += time.perf_counter() - begin

    def release(self, request: Request) -> None:
        """Tell the other."""
        begin = time.perf_counter()
        self.drafter.release(request)
        self.draft += time.perf_counter() - begin

    def reset(self) -> None:
        """Have the other forget."""
        self.drafter.reset()


class Drafted:
    """A drafter on our engine. See `Contender`.

    Args:
        name: of the drafter in reports.
        llm: of the target; no other request may be in it.
        drafter: made for it.
    """

    def __init__(self, name: str, llm: LLM, drafter: Drafter):
        self.name, self._llm, self._timed = name, llm, Timed(drafter)

    def reset(self) -> None:
        """See `Contender`, as for what follows."""
        self._timed.reset()

    def answer(self, asked: Sequence[Asked]) -> tuple[Run, list[Answer] | None]:
        """All at once, step by step until the last has ended."""
        engine, timed = self._llm.engine, self._timed
        begin, cpu = time.perf_counter(), time.thread_time()
        streams = [self._llm.stream(one.prompt, one.params, drafter=timed) for one in asked]
        requests = [*engine.scheduler.waiting]
        try:
            while not all(request.num_output for request in requests):
                engine.step()
            prefilled, ahead = time.perf_counter(), sum(request.num_output for request in requests)
            timed.restart()
            while engine.has_work:
                engine.step()
            end, cpu = time.perf_counter(), time.thread_time() - cpu
        except BaseException:  # an interrupt leaves no request behind
            for stream in streams:
                stream.cancel()
            raise
        stats = [request.stats for request in requests]
        run = Run(
            answers=len(asked),
            different=None,
            tokens=sum(one.emitted for one in stats),
            seconds=end - begin,
            prefill=prefilled - begin,
            ahead=ahead,
            cpu=cpu,
            draft=timed.draft,
            verify=timed.verify,
            steps=sum(one.steps for one in stats),
            first=sum(one.first for one in stats),
            drafted=sum(one.drafted for one in stats),
            accepted_at=added([one.accepted_at for one in stats]),
        )
        choices = [stream.choice for stream in streams]
        return run, [Answer(choice.token_ids, choice.text) for choice in choices]


def added(lists: Sequence[Sequence[int]]) -> list[int]:
    """Sums of what stands at the same place.

    Example:
        >>> added([[3, 1], [4]])
        [7, 1]
    """
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
