"""Stores the sample of every request, and sums samples up by target and load."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from soothsay.bench.journal import Journal

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are in seconds; `pieces` and `end` count from the time it was sent."""

    number: int  # the conversation's number in its trial
    turn: int  # from 0
    due: float  # since the start of the trial
    sent: float  # since the start of the trial
    end: float
    pieces: list[float] = field(default_factory=list)  # when each piece of text came
    tokens: int = 0
    counted: bool = False  # whether the server counted `tokens`; else pieces were counted
    finish_reason: str = ""
    prompt_tokens: int = 0  # 0: unknown
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    steps: float = 0.0  # forward passes that emitted tokens; 0: unknown
    drafted: int = 0
    error: str = ""  # kind of failure; empty: none
    message: str = ""  # the failure in full

    @property
    def late(self) -> float:
        """Delay caused by the benchmark itself before the request was sent."""
        return self.sent - self.due

    @property
    def first(self) -> float | None:
        """Time to the first piece of text."""
        return self.pieces[0] if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces of text. A piece may have several tokens."""
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        """Mean time between tokens, if all pieces have equally many tokens. None if there is only one piece.

        It is known as TPOT where each piece is one token.
        """
        if len(self.pieces) < 2 or not self.tokens:
            return None
        return statistics.mean(self.gaps) * len(self.pieces) / self.tokens


@dataclass(frozen=True, slots=True)
class Measure:
    """A latency. A request may have several values of it, or none."""

    name: str
    of: Callable[[Sample], list[float]]


def _some(value: float | None) -> list[float]:
    return [] if value is None else [value]


MEASURES = (
    Measure("TTFT", lambda sample: _some(sample.first)),
    Measure("ITL, chunk", lambda sample: sample.gaps),
    Measure("ITL, token", lambda sample: _some(sample.per_token)),
    Measure("E2E", lambda sample: [sample.end]),
)
"""What is measured of each request. `pages/load.html` says what the names mean."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of latency (service level objectives) in seconds. None: no limit."""

    first: float | None = None  # to the first token
    per_token: float | None = None  # mean time between an answer's tokens
    end: float | None = None  # to the end

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.first, self.per_token, self.end))

    def met(self, sample: Sample) -> bool:
        """Return whether a request was answered within the limits. A latency without a value is within."""
        pairs = (sample.first, self.first), (sample.per_token, self.per_token), (sample.end, self.end)
        in_time = all(time is None or limit is None or time <= limit for time, limit in pairs)
        return not sample.error and in_time


@dataclass(frozen=True, slots=True)
class Trial:
    """One target under one load in one round."""

    target: str
    load: str  # name of the load
    level: float
    round: int  # from 1
    begin: int  # place of the first conversation in the mix
    begun: int  # conversations that were started
    seconds: float  # from the trial's begin to the end of the last answer, or of the duration
    cpu: float  # CPU seconds of the benchmark itself
    whole: bool  # False: it was interrupted
    refused: list[str] = field(default_factory=list)  # optional fields that the server refused
    samples: list[Sample] = field(default_factory=list)

    @property
    def answered(self) -> list[Sample]:
        """Samples of requests that did not fail."""
        return [sample for sample in self.samples if not sample.error]

    @property
    def request_rate(self) -> float:
        """Answered requests a second."""
        return len(self.answered) / self.seconds if self.seconds else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens of answered requests a second."""
        return sum(sample.tokens for sample in self.answered) / self.seconds if self.seconds else 0.0

    def goodput(self, slo: Slo) -> float:
        """Return the requests a second that were answered within the limits."""
        return sum(map(slo.met, self.samples)) / self.seconds if self.seconds else 0.0

    def in_flight(self) -> list[tuple[float, int]]:
        """Return the requests in flight: times since the start, and the number from each time on."""
        changes = Counter[float]()
        for sample in self.samples:
            changes[sample.sent] += 1
            changes[sample.sent + sample.end] -= 1
        steps, running = list[tuple[float, int]](), 0
        for time in sorted(changes):
            running += changes[time]
            steps.append((time, running))
        return steps


@dataclass(frozen=True, slots=True)
class LoadRow:
    """All trials of a target under a load."""

    target: str
    load: str
    level: float
    trials: Mapping[int, Trial]  # by round

    @property
    def samples(self) -> list[Sample]:
        """Samples of all rounds."""
        return [sample for trial in self.trials.values() for sample in trial.samples]

    @property
    def answered(self) -> list[Sample]:
        """Samples of all rounds that did not fail."""
        return [sample for trial in self.trials.values() for sample in trial.answered]

    def median(self, rate: Callable[[Trial], float]) -> float:
        """Return the median of a rate over rounds."""
        return statistics.median(map(rate, self.trials.values()))

    def percentiles(self, measure: Measure) -> list[float]:
        """Return `PERCENTILES` of a latency over all answered requests, in seconds; empty without values."""
        values = [value for sample in self.answered for value in measure.of(sample)]
        return [float(value) for value in np.percentile(values, PERCENTILES)] if values else []

    def ratio(self, against: LoadRow, rate: Callable[[Trial], float]) -> float | None:
        """Return the median over rounds of this rate over that of `against`. None if no round has both."""
        both = [number for number in self.trials if number in against.trials]
        pairs = [(rate(self.trials[number]), rate(against.trials[number])) for number in both]
        ratios = [own / other for own, other in pairs if own and other]
        return statistics.median(ratios) if ratios else None

    @property
    def tokens_a_chunk(self) -> float:
        """Mean tokens of a piece of text; 1 if pieces were counted because the server counts no tokens."""
        pieces = sum(len(sample.pieces) for sample in self.answered)
        return sum(sample.tokens for sample in self.answered) / pieces if pieces else 0.0

    @property
    def accepted(self) -> float | None:
        """Tokens a step, with the bonus token. None if the server does not say."""
        told = [sample for sample in self.answered if sample.steps]
        steps = sum(sample.steps for sample in told)
        return sum(sample.tokens for sample in told) / steps if steps else None

    @property
    def cached(self) -> float | None:
        """Share of prompt tokens found in a prefix cache. None if the server does not say."""
        prompts = sum(sample.prompt_tokens for sample in self.answered)
        return sum(sample.cached_tokens for sample in self.answered) / prompts if prompts else None

    @property
    def mean_in_flight(self) -> float:
        """Mean number of requests in flight, over time and rounds."""
        seconds = sum(trial.seconds for trial in self.trials.values())
        return sum(sample.end for sample in self.samples) / seconds if seconds else 0.0


def median_of(measure: Measure) -> Callable[[Trial], float]:
    """Return a function of a trial: its median latency, or 0 if it has none."""

    def median(trial: Trial) -> float:
        values = [value for sample in trial.answered for value in measure.of(sample)]
        return statistics.median(values) if values else 0.0

    return median


class LoadResults(Journal[Trial]):
    """The trials in a journal. A trial is added when it ends."""

    WHAT, KEY = "measurements of 'bench serve'", ("target", "load", "round")

    def read_entry(self, entry: Mapping[str, Any]) -> None:
        """See `Journal`."""
        samples = [Sample(**sample) for sample in entry["samples"]]
        self.keep(Trial(**{**entry, "samples": samples}))

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a trial is stored and complete."""
        return key in self.by_key and self.by_key[key].whole

    @property
    def trials(self) -> list[Trial]:
        """All stored trials."""
        return list(self.by_key.values())

    def begin(self, load: str, number: int) -> int:
        """Return the place in the mix where the trials of a load and a round begin.

        It is the same for all targets, and after all conversations of other trials.
        """
        for trial in self.trials:
            if trial.whole and (trial.load, trial.round) == (load, number):
                return trial.begin
        return max((trial.begin + trial.begun for trial in self.trials), default=0)

    def rows(self) -> list[LoadRow]:
        """Return a row for each load and target, in order."""
        loads = dict.fromkeys((trial.load, trial.level) for trial in self.trials)
        rows = []
        for name, level in loads:
            for target in self.conditions["targets"]:
                own = {t.round: t for t in self.trials if (t.load, t.target) == (name, target)}
                if own:
                    rows.append(LoadRow(target, name, level, own))
        return rows

    def by_load(self) -> Iterator[tuple[str, Sequence[LoadRow]]]:
        """Yield the rows of each load."""
        rows = self.rows()
        for load in dict.fromkeys(row.load for row in rows):
            yield load, [row for row in rows if row.load == load]
