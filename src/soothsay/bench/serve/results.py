"""What came of every request, in a file that a later run continues, and what it adds up to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from soothsay.bench.journal import Journal
from soothsay.errors import SoothsayError

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are in seconds; those of pieces and of the end count from when it was sent."""

    number: int  # of the conversation in its trial
    turn: int  # of the conversation, from 0
    due: float  # since the trial's begin
    sent: float  # since the trial's begin
    end: float
    pieces: list[float] = field(default_factory=list)  # when each piece of text came
    tokens: int = 0
    counted: bool = False  # whether the server said so; else its pieces were counted
    finish_reason: str = ""
    prompt_tokens: int = 0  # 0: the server does not tell
    cached_tokens: int = 0  # of them, found in a prefix cache
    steps: float = 0.0  # passes that gave tokens; 0: the server does not tell
    drafted: int = 0
    error: str = ""  # what kind of failure; empty: none
    message: str = ""  # of the failure

    @property
    def late(self) -> float:
        """How long the benchmark itself took to send it."""
        return self.sent - self.due

    @property
    def first(self) -> float | None:
        """Time to the first piece of text."""
        return self.pieces[0] if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces, which may have several tokens each."""
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        """Mean time from one token to the next, all pieces taken to have as many; None if there is one piece.

        Where a piece is a token this is what others call TPOT.
        """
        if len(self.pieces) < 2 or not self.tokens:
            return None
        return statistics.mean(self.gaps) * len(self.pieces) / self.tokens


@dataclass(frozen=True, slots=True)
class Measure:
    """A latency, of which there may be several or none in a request."""

    name: str
    meaning: str
    of: Callable[[Sample], list[float]]


def _some(value: float | None) -> list[float]:
    return [] if value is None else [value]


MEASURES = (
    Measure("TTFT", "time to first token: to the first piece of text", lambda s: _some(s.first)),
    Measure("ITL, chunk", "inter-token latency as seen: between pieces of text", lambda s: s.gaps),
    Measure(
        "ITL, token",
        "inter-token latency by tokens: an answer's mean, its pieces taken to have equally many",
        lambda s: _some(s.per_token),
    ),
    Measure("E2E", "end to end: until the answer's end", lambda s: [s.end]),
)


@dataclass(frozen=True, slots=True)
class Slo:
    """What users are promised; in seconds, None: nothing."""

    first: float | None = None  # to the first token
    per_token: float | None = None  # mean time between an answer's tokens
    end: float | None = None  # to the end

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.first, self.per_token, self.end))

    def met(self, sample: Sample) -> bool:
        """Whether a request has been answered, and in time. Where there is no such time, it is kept."""
        pairs = (
            (sample.first, self.first),
            (sample.per_token, self.per_token),
            (sample.end, self.end),
        )
        in_time = all(time is None or limit is None or time <= limit for time, limit in pairs)
        return not sample.error and in_time


Key = tuple[str, str, int]
"""A target, a load by its name, and a round."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One target under one load, once."""

    target: str
    load: str  # its name
    level: float
    round: int  # from 1
    begin: int  # the first conversation's place in the mix
    begun: int  # conversations
    seconds: float  # from the first request's due time to the last end
    cpu: float  # of them, those of one core that the benchmark itself took
    whole: bool  # else it was interrupted
    refused: list[str] = field(default_factory=list)  # options that the server did not take
    samples: list[Sample] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.target, self.load, self.round

    @property
    def answered(self) -> list[Sample]:
        """Requests that did not fail."""
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
        """Requests a second that keep what was promised."""
        return sum(map(slo.met, self.samples)) / self.seconds if self.seconds else 0.0

    def in_flight(self) -> list[tuple[float, int]]:
        """Requests on their way: a time since the begin, and how many there are from then on."""
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
class Row:
    """What a target did under a load, all rounds together."""

    target: str
    load: str
    level: float
    trials: Mapping[int, Trial]  # by round

    @property
    def samples(self) -> list[Sample]:
        """Of all rounds."""
        return [sample for trial in self.trials.values() for sample in trial.samples]

    @property
    def answered(self) -> list[Sample]:
        """Of all rounds."""
        return [sample for trial in self.trials.values() for sample in trial.answered]

    @property
    def errors(self) -> Counter[str]:
        """How often, by kind."""
        return Counter(sample.error for sample in self.samples if sample.error)

    def median(self, rate: Callable[[Trial], float]) -> float:
        """Over rounds."""
        return statistics.median(map(rate, self.trials.values()))

    def percentiles(self, measure: Measure) -> list[float]:
        """`PERCENTILES` of a latency over all answered requests, in seconds; empty if there is none."""
        values = [value for sample in self.answered for value in measure.of(sample)]
        return [float(value) for value in np.percentile(values, PERCENTILES)] if values else []

    def ratio(self, against: Row, rate: Callable[[Trial], float]) -> float | None:
        """The median over rounds of one rate over another's. None if no round has both."""
        pairs = [
            (rate(trial), rate(against.trials[number]))
            for number, trial in self.trials.items()
            if number in against.trials
        ]
        ratios = [own / other for own, other in pairs if own and other]
        return statistics.median(ratios) if ratios else None

    @property
    def tokens_a_chunk(self) -> float:
        """On average; 1 where pieces were counted for want of tokens."""
        pieces = sum(len(sample.pieces) for sample in self.answered)
        return sum(sample.tokens for sample in self.answered) / pieces if pieces else 0.0

    @property
    def accepted(self) -> float | None:
        """Tokens a step, the bonus token counted. None if the server does not tell."""
        told = [sample for sample in self.answered if sample.steps]
        steps = sum(sample.steps for sample in told)
        return sum(sample.tokens for sample in told) / steps if steps else None

    @property
    def cached(self) -> float | None:
        """Share of the prompts' tokens that were in a prefix cache. None if the server does not tell."""
        prompts = sum(sample.prompt_tokens for sample in self.answered)
        return sum(sample.cached_tokens for sample in self.answered) / prompts if prompts else None

    @property
    def mean_in_flight(self) -> float:
        """Requests on their way, over time and the rounds."""
        seconds = sum(trial.seconds for trial in self.trials.values())
        return sum(sample.end for sample in self.samples) / seconds if seconds else 0.0


def median_of(measure: Measure) -> Callable[[Trial], float]:
    """A trial's median latency; 0 if it has none."""

    def median(trial: Trial) -> float:
        values = [value for sample in trial.answered for value in measure.of(sample)]
        return statistics.median(values) if values else 0.0

    return median


class Results:
    """Trials, each kept in the journal as soon as it has ended.

    Raises `SoothsayError` if the journal's entries are something else.
    """

    def __init__(self, journal: Journal):
        self.journal = journal
        try:
            trials = [_trial(entry) for entry in journal.entries]
        except (TypeError, KeyError) as error:
            raise SoothsayError(f"this does not hold measurements of 'bench serve' ({error!r})") from None
        self._trials = {trial.key: trial for trial in trials}

    @classmethod
    def read(cls, path: Path) -> Results:
        """What a file holds. Raises `SoothsayError` if it is something else or cannot be read."""
        return cls(Journal.read(path))

    def add(self, trial: Trial) -> None:
        """Keep a trial, in the file too; in place of one of the same key."""
        self._trials[trial.key] = trial
        self.journal.add(asdict(trial))

    def __contains__(self, key: Key) -> bool:
        """Whether a trial is there, and whole."""
        return key in self._trials and self._trials[key].whole

    @property
    def trials(self) -> list[Trial]:
        """All that are there."""
        return list(self._trials.values())

    def begin(self, load: str, number: int) -> int:
        """Where in the mix the trials of a load and a round begin: the same for all targets, and behind all
        that was asked in others."""
        for trial in self._trials.values():
            if trial.whole and (trial.load, trial.round) == (load, number):
                return trial.begin
        return max((trial.begin + trial.begun for trial in self._trials.values()), default=0)

    def rows(self) -> list[Row]:
        """Load by load, targets in their order."""
        loads = dict.fromkeys((trial.load, trial.level) for trial in self._trials.values())
        rows = []
        for name, level in loads:
            for target in self.journal.conditions["targets"]:
                own = {t.round: t for t in self.trials if (t.load, t.target) == (name, target)}
                if own:
                    rows.append(Row(target, name, level, own))
        return rows

    def by_load(self) -> Iterator[tuple[str, Sequence[Row]]]:
        """Rows of the same load together."""
        rows = self.rows()
        for load in dict.fromkeys(row.load for row in rows):
            yield load, [row for row in rows if row.load == load]


def _trial(entry: Mapping[str, object]) -> Trial:
    raw = dict(entry)
    samples = raw.pop("samples")
    return Trial(**raw, samples=[Sample(**sample) for sample in samples])  # type: ignore[arg-type, attr-defined]
