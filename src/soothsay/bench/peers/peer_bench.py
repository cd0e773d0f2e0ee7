"""`soothsay bench peers`: engines that run the same weights take turns.

Every engine, also ours, runs in a process of its own with the same number of threads. In each round each
engine decodes token by token, reads a prompt, and runs passes of several tokens as speculation needs them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

from soothsay import SoothsayError
from soothsay.bench.bench_plans import PeerPlan
from soothsay.bench.measure import turns
from soothsay.bench.peers.engine_bench import EngineBench
from soothsay.bench.peers.engines.peer import UnavailableError
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.peers.peer_results import (
    AGREEMENT,
    ANSWER,
    CONTEXT,
    OURS,
    PLAIN,
    PROMPT,
    VERIFIED,
    PeerRecord,
    PeerResults,
)
from soothsay.bench.prompts import PASSAGE, QUESTION
from soothsay.progress import tell_progress

VERIFICATIONS = 5
"""Number of passes of one size in a round; the median counts."""


class PeerBench(EngineBench):
    """Measures what a plan says.

    Args:
        plan: what to measure.
        path: the file for results; an existing file is continued.

    Raises:
        SoothsayError: a peer is unknown, the plan does not fit the kind of model, the file is of another run,
            or an engine fails.
    """

    def __init__(self, plan: PeerPlan, path: Path | None = None):
        super().__init__(plan, max(CONTEXT + plan.tokens + 1, PROMPT + 1, CONTEXT + max(VERIFIED)))
        self.plan, self.dtypes = plan, plan.dtypes or ["auto" if self.is_file else "bfloat16"]
        if self.is_file:
            if other := [dtype for dtype in self.dtypes if dtype != "auto"]:
                raise SoothsayError(
                    f"{plan.model}: engines run a GGUF file as it is, and not in {', '.join(other)}"
                )
        elif "auto" in self.dtypes:
            raise SoothsayError("engines are compared at equal weights; name their element type")
        text = range(1, self.vocab_size)
        ids = self.tokenizer.encode(f"{QUESTION} {PASSAGE}") if self.tokenizer else text
        self.ids = list(islice(cycle(ids), PROMPT))
        self.results = PeerResults({**self.conditions, "tokens": plan.tokens}, path)

    def run(self) -> PeerResults:
        """Measure what is not in the file yet."""
        for dtype in self.dtypes:
            with ExitStack() as stack:
                engines = []
                for name in (OURS, *self.peers):
                    try:
                        engine = stack.enter_context(self.client(name, dtype))
                        engine.call("load")
                    except UnavailableError as reason:
                        self.notes.append(f"{name}, {dtype}: {reason}")
                    else:
                        engines.append(engine)
                self._rounds(engines, dtype)
                self._answers(engines, dtype)
        return self.results

    def _rounds(self, engines: Sequence[PeerProcess], dtype: str) -> None:
        """Measure steps, prompts and passes. The first round warms up and is not counted."""
        steps = len(engines) * (self.plan.rounds + 1)
        for done, (number, engine) in enumerate(turns(engines, self.plan.rounds + 1)):
            tell_progress(f"{dtype}: rounds", done, steps)
            for measure in ("decode", "prompt", *(f"verify {rows}" for rows in VERIFIED)):
                missing = any(
                    (measure, dtype, engine.name, PLAIN, str(item)) not in self.results
                    for item in ([number] if number else range(1, self.plan.rounds + 1))
                )
                if missing and (record := self._measure(engine, dtype, measure, number)) and number:
                    self.results.add(record)
        tell_progress(f"{dtype}: rounds", steps, steps)

    def _measure(self, engine: PeerProcess, dtype: str, measure: str, number: int) -> PeerRecord | None:
        output, start = list[int](), 16 * number % (PROMPT - CONTEXT)  # another context each round
        context = self.ids[start : start + CONTEXT]
        if measure == "decode":
            tokens = self.plan.tokens
            seconds, output = engine.call("decode", context, tokens)
        elif measure == "prompt":
            tokens, seconds = len(self.ids), engine.call("prompt", self.ids)
        else:
            tokens = int(measure.split()[1])
            passes = engine.call("verify", context, tokens, VERIFICATIONS)
            if passes is None:
                return None
            seconds = statistics.median(passes)
        kind = measure, dtype, engine.name, PLAIN, str(number)
        return PeerRecord(*kind, seconds, tokens, engine.version, output=output[:AGREEMENT])

    def _answers(self, engines: Sequence[PeerProcess], dtype: str) -> None:
        """Measure whole answers to every question, by every engine in each of its modes."""
        contestants = [(engine, mode) for engine in engines for mode in engine.modes]
        warm, impossible = set[tuple[str, str]](), set[tuple[str, str]]()
        steps = len(self.questions) * len(contestants)
        for done, (number, (engine, mode)) in enumerate(turns(contestants, len(self.questions))):
            tell_progress(f"{dtype}: answers", done, steps)
            question, ids = self.questions[number]
            own = engine.name, mode
            kind = ANSWER, dtype, *own, question.id
            if own in impossible or kind in self.results:
                continue
            if own not in warm:
                try:
                    engine.call("generate", self.ids, 16, mode)
                except UnavailableError as reason:
                    impossible.add(own)
                    self.notes.append(f"{engine.name}, {dtype}, {mode}: {reason}")
                    continue
                warm.add(own)
            seconds, output = engine.call("generate", ids, self.plan.max_tokens, mode)
            what, made = (*kind, seconds, len(output), engine.version), output[:AGREEMENT]
            self.results.add(PeerRecord(*what, question.task, made))
        if steps:
            tell_progress(f"{dtype}: answers", steps, steps)
