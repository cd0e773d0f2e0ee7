"""`soothsay bench host`: what a step costs beside the model's pass, by part.

The pass of the model is replaced. A scripted pass reads the model's own answer off a list, so drafts are
right where they would be right. It lasts as long as a small model's pass, and writes keys, values and logits.
With "cold" caches it also reads so much memory that they keep nothing of the step, as larger models do.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from soothsay import LLM, EngineConfig, SamplingParams
from soothsay.bench.bench_plans import GIVEN, HostPlan
from soothsay.bench.measure import turns
from soothsay.bench.prompts import PASSAGE
from soothsay.bench.running import running
from soothsay.bench.tables import ResultTable, records_table
from soothsay.core.batch import Batch
from soothsay.core.cache import KVPool
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, SignalingDrafter, Target
from soothsay.drafters.control.compose import Composite
from soothsay.drafters.registry import build_drafter
from soothsay.model.timing.pass_times import PassTimes

PASS_SECONDS, ROW_SECONDS = 0.003, 0.0001
"""Time of a scripted pass of one row, and of each further row: about SmolLM2's on two cores."""

TOP = 40.0
"""Logit of the scripted token. No noise outweighs it, so answers at all temperatures follow the script."""

STAGES = {"_propose": "decide", "_forward": "lay out", "_verify": "verify", "_commit": "commit"} | {
    "_observe": "observe"
}
"""The stages of a step, methods of the engine, and the names of the parts that they are."""

PARTS = ("schedule", "drafters", *STAGES.values(), "update", "rest")
"""Parts of a step in order. What drafters take within "decide" and "observe" is "drafters"."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """The mean time of a step on the host, by part."""

    drafter: str
    batch: int
    temperature: float
    caches: str  # warm or cold
    tokens: float  # a step and request
    us: dict[str, float]  # microseconds by part

    @property
    def total(self) -> float:
        """Microseconds of all parts."""
        return sum(self.us.values())


class PartClock:
    """Adds up the time within functions, by part. The time of a call within another one counts once.

    Functions note when they begin and end. The sums are made later, so that the clock takes little time.
    """

    def __init__(self) -> None:
        self._notes: list[Any] = []  # by turns: a part that begins, or None: the last one ends; and when

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a method of an object."""
        function: Callable[..., Any] = getattr(owner, name)
        note, clock = self._notes.append, time.perf_counter

        def timed(*args: Any, **options: Any) -> Any:
            note(part)
            note(clock())
            try:
                return function(*args, **options)
            finally:
                note(None)
                note(clock())

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """The seconds of each part since the last call."""
        seconds, running, before = defaultdict[str, float](float), list[str](), 0.0
        for part, now in zip(self._notes[::2], self._notes[1::2], strict=True):
            if running:
                seconds[running[-1]] += now - before
            if part is None:
                running.pop()
            else:
                running.append(part)
            before = now
        self._notes.clear()
        return seconds


class ScriptedPass:
    """Takes the place of `Transformer.run`: logits whose best token is that of a script, by position.

    Args:
        script: tokens of the prompt and the answer of every request.
        vocab_size: of the model.
        hidden_size: of the model.
        most: logit rows of a pass, at most.
    """

    def __init__(self, script: Sequence[int], vocab_size: int, hidden_size: int, most: int):
        self.script, self.flushed = torch.tensor([*script, 0]), torch.empty(0)
        self._others = torch.randn(64, vocab_size).mul_(2)  # logits of the other tokens
        self._hidden = torch.randn(1, hidden_size)
        self._logits = torch.empty(most, vocab_size)  # of each pass, which no step frees

    def __call__(
        self, batch: Batch, cache: KVPool, layers: object = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """See `Transformer.run`."""
        until = time.perf_counter() + PASS_SECONDS + ROW_SECONDS * len(batch.tokens)
        self.flushed.sum()
        while time.perf_counter() < until:
            pass
        # written late, so they are in the caches as a real pass leaves them
        for layer in range(len(cache.layers)):
            cache.kv(layer).index_fill_(1, batch.slots, 0.0)
        positions = batch.positions[batch.logit_rows]
        logits = self._logits[: len(positions)]
        torch.index_select(self._others, 0, positions % len(self._others), out=logits)
        logits[range(len(logits)), self.script[(positions + 1).clamp(max=len(self.script) - 1)]] = TOP
        hidden = self._hidden.repeat(len(batch.tokens), 1)
        return hidden, (hidden,) * len(taps), logits


class GivenTree(Drafter):
    """Hands over a tree: the next three tokens of the script, and beside each as many wrong ones as there is
    room for. One request has 16 nodes, and each of several 4."""

    max_nodes = 16

    def __init__(self, target: Target, script: Sequence[int]):
        super().__init__(target)
        self._script = [*script, 0, 0, 0]

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The tree for each request."""
        wrong = 4 if len(requests) == 1 else 0
        return [self._tree(request.length, wrong) for request in requests]

    def _tree(self, length: int, wrong: int) -> DraftTree:
        tree, node = DraftTree(self._script[length - 1]), 0
        for token in self._script[length : length + 3]:
            for other in range(1, wrong + 1):
                tree.add(node, token ^ other, -2.0)
            node = tree.add(node, token, -0.3)
        return tree


class HostBench:
    """An engine whose passes are scripted and whose parts are timed.

    Args:
        model: what `LLM` takes.
        tokens: of an answer.
        batch: largest number of requests at a time.
        flush_bytes: memory that a pass reads where caches are to be cold; more than they hold.
        kernels: see `LLM`.
    """

    def __init__(self, model: str, tokens: int, batch: int, flush_bytes: int, kernels: str = "auto"):
        config = EngineConfig(prefix_caching=False, max_requests=batch, kv_tokens=batch * 1024)
        llm = LLM(model, drafter="none", kernels=kernels, config=config)
        self.llm, self.engine, self.clock = llm, llm.engine, PartClock()
        self.params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        asked = f"Summarize the following passage.\n\n{PASSAGE}"
        self.prompt = llm.chat_prompt([{"role": "user", "content": asked}])
        self.script = [*self.prompt, *llm.generate(self.prompt, self.params).token_ids]
        self._flush = torch.ones(flush_bytes // 4)
        spec = llm.model.spec
        most = batch * llm.config.max_tree
        self.scripted = ScriptedPass(self.script, spec.vocab_size, spec.hidden_size, most)
        llm.model.run = self.scripted  # type: ignore[assignment, method-assign]
        for owner, name, part in (
            *((self.engine, name, part) for name, part in STAGES.items()),
            (self.engine, "step", "rest"),
            (self.engine.scheduler, "schedule", "schedule"),
            (self.engine.scheduler, "update", "update"),
            (llm.model, "run", "pass"),
        ):
            self.clock.watch(owner, name, part)

    def drafter(self, spec: str) -> Drafter:
        """Build a drafter whose own time is the part "drafters"."""
        times = PassTimes([1, 2], [1], [[PASS_SECONDS, PASS_SECONDS + ROW_SECONDS]])
        target = replace(self.engine.target, times=lambda: times)
        built = GivenTree(target, self.script) if spec == GIVEN else build_drafter(spec, target)
        for part in built.parts if isinstance(built, Composite) else (built,):
            signals = ("signal",) if isinstance(part, SignalingDrafter) else ()
            for name in ("propose", "observe", *signals):
                self.clock.watch(part, name, "drafters")
        return built

    def run(self, drafter: Drafter, batch: int, temperature: float, is_cold: bool) -> HostTime:
        """Answer once, and time the steps that read no prompt and in which every request takes part."""
        drafter.reset()
        self.scripted.flushed = self._flush if is_cold else self._flush[:0]
        params = replace(self.params, temperature=temperature)
        asked = [(self.prompt, replace(params, seed=seed)) for seed in range(batch)]
        with running(self.llm, asked, drafter=drafter) as requests:
            while not all(request.num_output for request in requests):
                self.engine.step()
            self.clock.take()
            steps, before = 0, sum(request.num_output for request in requests)
            while all(request.finish_reason is None for request in requests):
                self.engine.step()
                steps += 1
            seconds = self.clock.take()
            us = {part: 1e6 * seconds[part] / steps for part in PARTS}
            made = (sum(request.num_output for request in requests) - before) / batch
            while self.engine.has_work:
                self.engine.step()
        return HostTime(drafter.name, batch, temperature, "cold" if is_cold else "warm", made / steps, us)


def bench_host(plan: HostPlan, flush_bytes: int = 2**26) -> list[HostTime]:
    """Measure each drafter in each situation, in turns, after a round that does not count.

    `flush_bytes`: see `HostBench`. Returns the medians over the rounds.
    """
    bench = HostBench(plan.model, plan.tokens, max(plan.batches), flush_bytes, plan.kernels)
    built = {spec: bench.drafter(spec) for spec in plan.drafters}
    kinds = [*product(plan.drafters, plan.batches, plan.temperatures, (False, True))]
    found = defaultdict[Any, list[HostTime]](list)
    for number, kind in turns(kinds, plan.rounds + 1):
        spec, batch, temperature, is_cold = kind
        measured = replace(bench.run(built[spec], batch, temperature, is_cold), drafter=spec)
        if number:
            found[kind].append(measured)
    return [_median(found[kind]) for kind in kinds]


def _median(rounds: Sequence[HostTime]) -> HostTime:
    us = {part: statistics.median(one.us[part] for one in rounds) for part in PARTS}
    return replace(rounds[-1], tokens=statistics.median(one.tokens for one in rounds), us=us)


def host_table(times: Sequence[HostTime], rounds: int) -> ResultTable:
    """A row for each drafter and situation."""

    def cell(part: str) -> Callable[[HostTime], str]:
        return lambda time: f"{time.us[part]:.0f}"

    return records_table(
        times,
        {"drafter": "{.drafter}", "batch": "{.batch}", "T": "{.temperature:g}", "caches": "{.caches}"},
        {
            "tokens": "{.tokens:.2f}",
            **{part: cell(part) for part in PARTS},
            "all": "{.total:.0f}",
        },
        title="microseconds of a step on the host, beside the pass",
        caption=f"median of {rounds} rounds; tokens are those of a step and request",
    )
