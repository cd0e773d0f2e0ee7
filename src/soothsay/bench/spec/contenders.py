"""Contenders of `soothsay bench spec`: drafters on our engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from soothsay import LLM, Drafter, DraftTree, Observation, Request, SamplingParams
from soothsay.bench.running import answer_of, running
from soothsay.bench.spec.run_times import RunTimes, TreeCounts, added
from soothsay.core.verify import Promise
from soothsay.drafters.base import DrafterProxy


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """One turn of a question, as a request."""

    prompt: list[int]  # token ids
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A contender's answer to one turn."""

    token_ids: list[int]  # an end token included
    text: str


@dataclass(frozen=True, slots=True)
class SeenTree:
    """A tree that was verified."""

    request: Request
    num_output: int  # of the request, before the step
    tree: DraftTree
    path: list[int]  # accepted nodes
    draft: float  # seconds of `propose`, for all requests of the step
    verify: float  # seconds from there to the verdict, for all requests of the step

    @property
    def accepted(self) -> list[int]:
        """Accepted nodes without those after the answer's end. Right once the request has ended."""
        return self.path[: self.request.num_output - self.num_output - 1]

    def record(self, answer: int) -> dict[str, Any]:
        """The tree as JSON values. `answer` is the number of its answer in the batch."""
        return {
            "answer": answer,
            "said": self.num_output,
            "tokens": self.tree.tokens,
            "parents": self.tree.parents,
            "scores": [round(score, 4) for score in self.tree.scores],
            "accepted": self.accepted,
            "draft": self.draft,
            "verify": self.verify,
        }


class TimedDrafter(DrafterProxy):
    """Measures the time that a drafter takes, and the time between its draft and the verdict.

    Attributes:
        draft: seconds in the drafter since `restart`.
        verify: seconds from the end of `propose` to the start of `observe`, since `restart`.
        passes: steps since `restart` that verified trees.
        seen: these trees.
    """

    def __init__(self, drafter: Drafter):
        super().__init__(drafter)
        self.restart()

    def restart(self) -> None:
        """Set the times to zero, and forget the trees."""
        self.draft = self.verify = 0.0
        self.passes = 0
        self.seen: list[SeenTree] = []
        self._proposed: float | None = None
        self._drafting = 0.0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Draft, and take the time."""
        begin = time.perf_counter()
        trees = self.drafter.propose(requests)
        self._proposed = time.perf_counter()
        self._drafting = self._proposed - begin
        self.draft += self._drafting
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Let the drafter learn, and take the time."""
        begin = time.perf_counter()
        # None: the step was a prompt chunk, without a draft
        verifying = 0.0 if self._proposed is None else begin - self._proposed
        self.verify += verifying
        self._proposed = None
        self.drafter.observe(observations)
        self.draft += time.perf_counter() - begin
        times = self._drafting, verifying
        seen = [
            SeenTree(one.request, one.request.num_output, one.tree, one.verdict.path, *times)
            for one in observations
            if one.tree is not None and one.verdict is not None
        ]
        self.passes += bool(seen)
        self.seen += seen

    def release(self, request: Request) -> None:
        """Let the drafter forget a request, and take the time."""
        begin = time.perf_counter()
        self.drafter.release(request)
        self.draft += time.perf_counter() - begin


class Contender:
    """A drafter on our engine, which answers batches of turns.

    Args:
        name: the drafter's name in reports.
        llm: the target's engine, without other requests.
        drafter: a drafter built for that target.
        verifier: by name; see `SamplingParams`.
        trees: whether runs have their `trees`.
    """

    def __init__(self, name: str, llm: LLM, drafter: Drafter, verifier: str = "match", trees: bool = False):
        self.name, self._llm, self._timed = name, llm, TimedDrafter(drafter)
        self._verifier, self._keep_trees = verifier, trees

    def reset(self) -> None:
        """Forget everything learnt from earlier questions."""
        self._timed.reset()

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Answer the turns in one batch.

        Returns the times, with `different` still None, and the answers; None if the verifier does not keep
        the tokens, so that they cannot be compared.
        """
        params = [replace(one.params, verifier=self._verifier) for one in asked]
        engine, begin, cpu = self._llm.engine, time.perf_counter(), time.thread_time()
        turns = [(one.prompt, own) for one, own in zip(asked, params, strict=True)]
        with running(self._llm, turns, drafter=self._timed) as requests:
            while engine.has_work and not all(request.num_output for request in requests):
                engine.step()
            prefilled, ahead = time.perf_counter(), sum(request.num_output for request in requests)
            self._timed.restart()
            while engine.has_work:
                engine.step()
        end, cpu = time.perf_counter(), time.thread_time() - cpu
        run = self._run(requests, end - begin, prefilled - begin, ahead, cpu)
        answers = [TurnAnswer(answer_of(request), request.answer.text) for request in requests]
        if any(own.rule.promise is not Promise.TOKENS for own in params):
            return run, None
        return run, answers

    def _run(
        self, requests: Sequence[Request], seconds: float, prefill: float, ahead: int, cpu: float
    ) -> RunTimes:
        """What was measured, with counts of steps and trees."""
        timed, stats, trees = self._timed, [request.stats for request in requests], TreeCounts()
        for seen in timed.seen:
            trees.record(seen.tree, seen.accepted)
        before = sum(seen.request.num_prompt + seen.num_output - 1 for seen in timed.seen)
        names = {"tokens": "emitted", "steps": "steps", "first": "first", "drafted": "drafted"}
        return RunTimes(
            answers=len(requests),
            different=None,
            **{name: sum(getattr(one, theirs) for one in stats) for name, theirs in names.items()},
            draft=timed.draft,
            verify=timed.verify,
            accepted_at=added([one.accepted_at for one in stats]),
            passes=timed.passes,
            context=before / len(timed.seen) if timed.seen else 0.0,
            tree_sizes=trees.sizes,
            accepted_ranks=trees.ranks,
            trees=[seen.record(requests.index(seen.request)) for seen in timed.seen if self._keep_trees],
            seconds=seconds,
            prefill=prefill,
            ahead=ahead,
            cpu=cpu,
        )
