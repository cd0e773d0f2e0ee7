"""Contenders of `soothsay bench spec`: drafters on our engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from soothsay import LLM, Drafter, Request, SamplingParams, StepTrace
from soothsay.bench.running import answer_of, running
from soothsay.bench.spec.run_times import RunTimes, TreeCounts, added
from soothsay.core.verify import Promise

AskedTurn = tuple[list[int], SamplingParams]
"""One turn of a question, as a request: its token ids and parameters."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A contender's answer to one turn."""

    token_ids: list[int]  # an end token included
    text: str


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
        self.name, self._llm, self._drafter = name, llm, drafter
        self._verifier, self._keep_trees = verifier, trees

    def reset(self) -> None:
        """Forget everything learnt from earlier questions."""
        self._drafter.reset()

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Answer the turns in one batch.

        Returns the times, with `different` still None, and the answers; None if the verifier does not keep
        the tokens, so that they cannot be compared.
        """
        turns = [(prompt, replace(params, verifier=self._verifier)) for prompt, params in asked]
        engine, begin, cpu = self._llm.engine, time.perf_counter(), time.thread_time()
        with running(self._llm, turns, self._drafter, traced=True) as requests:
            while engine.has_work and not all(request.num_output for request in requests):
                engine.step()
            prefilled, ahead = time.perf_counter(), [request.num_output for request in requests]
            before = [len(request.traces or ()) for request in requests]
            while engine.has_work:
                engine.step()
        end, cpu = time.perf_counter(), time.thread_time() - cpu
        decoded = [[*(one.traces or ())][read:] for one, read in zip(requests, before, strict=True)]
        run = self._run(requests, decoded, ahead)
        run = replace(run, seconds=end - begin, prefill=prefilled - begin, cpu=cpu)
        answers = [TurnAnswer(answer_of(request), request.answer.text) for request in requests]
        if any(own.rule.promise is not Promise.TOKENS for _, own in turns):
            return run, None
        return run, answers

    def _run(
        self, requests: Sequence[Request], decoded: Sequence[Sequence[StepTrace]], ahead: Sequence[int]
    ) -> RunTimes:
        """Counts of steps and trees. `ahead` are the tokens of each answer before its `decoded` steps."""
        stats, counts, context = [request.stats for request in requests], TreeCounts(), list[int]()
        trees, steps = list[dict[str, Any]](), dict[int, Mapping[str, float]]()
        for number, (request, own, said) in enumerate(zip(requests, decoded, ahead, strict=True)):
            for step in own:
                accepted = step.path[: request.num_output - said - 1]  # none after the answer's end
                counts.record(step, accepted)
                context.append(request.num_prompt + said - 1)
                steps[id(step.times)] = step.times  # which all requests of a step share
                if self._keep_trees:
                    trees.append({"answer": number, "said": said, **asdict(step), "accepted": accepted})
                said += len(step.path) + 1
        names = {"tokens": "emitted", "steps": "steps", "first": "first", "drafted": "drafted"}
        return RunTimes(
            answers=len(requests),
            different=None,
            **{name: sum(getattr(one, theirs) for one in stats) for name, theirs in names.items()},
            seconds=0.0,
            prefill=0.0,
            ahead=sum(ahead),
            draft=sum(times["draft"] for times in steps.values()),
            verify=sum(times["pass"] + times["verify"] for times in steps.values()),
            accepted_at=added([one.accepted_at for one in stats]),
            passes=len(steps),
            context=sum(context) / len(context) if context else 0.0,
            tree_sizes=counts.sizes,
            accepted_ranks=counts.ranks,
            trees=trees,
        )
