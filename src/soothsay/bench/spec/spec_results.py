"""The measurements of Spec-Bench, and the scores computed from them."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from soothsay.bench.journal import Journal
from soothsay.bench.spec.contenders import TurnAnswer
from soothsay.bench.spec.run_times import RunTimes, ratio
from soothsay.bench.spec.theory import predicted_seconds, speedups_by_nodes
from soothsay.model.timing.pass_times import PassTimes, measurements_as_json, parse_measurements

PLAIN = "none"
OVERALL = "overall"

RESAMPLES = 1000
"""Samples of the questions, drawn with replacement, that an interval comes from (bootstrap, Efron 1979)."""

SLOWER = 0.99
"""A speed-up whose interval ends below this is a loss."""

Setting = tuple[float, int, int]
"""Temperature, batch, round."""

PASSES = "passes"
"""The key of journal entries with times of passes."""

Key = tuple[Setting, int, int]
"""A setting, the first question of a group, and a turn: together they identify a `Lap`."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One turn of a group of questions, answered by all contenders one after the other."""

    temperature: float
    batch: int  # questions in a group, answered at once; a task's last group may have fewer
    round: int  # from 1
    task: str
    group: list[int]  # numbers of the questions
    turn: int  # from 0
    answered: list[int]  # questions of the group that have this turn, and room for it in the context
    left_out: int  # turns without room in the context, and the turns after them
    runs: dict[str, RunTimes]  # by contender
    answers: list[list[int]] = field(default_factory=list)  # plain decoding's; empty if already known
    texts: list[str] = field(default_factory=list)  # the same answers as text

    @property
    def setting(self) -> Setting:
        """Temperature, batch and round."""
        return self.temperature, self.batch, self.round

    @property
    def first(self) -> int:
        """The number of the group's first question."""
        return self.group[0]


@dataclass(frozen=True, slots=True)
class Score:
    """A contender's results in a task. Speed-ups are relative to plain decoding in the same laps."""

    answers: int
    different: int | None  # answers that differ from plain decoding's: must be 0. None: not compared
    rate: float  # tokens a second, the mean over questions
    decode_rate: float  # the same, after the first token
    speedup: float  # ratio of `rate`, as on the Spec-Bench leaderboard
    median_speedup: float  # median over questions of the ratio of rates
    decode_speedup: float  # ratio of `decode_rate`
    cpu_speedup: float  # as `speedup`, in this process's CPU time; 0: unknown
    cpu_share: float  # CPU time of this process as a share of the time that passed
    accepted: float  # tokens a step, with the bonus token, without prefill; 0: unknown
    drafted: float  # draft tokens a step
    phases: Mapping[str, float]  # milliseconds a token: prefill, draft, verify, other
    by_depth: Sequence[float]  # share of steps that accepted a draft token at depth 1, 2, ...
    predicted: float = 0.0  # what theory says that `speedup` should be; 0: unknown
    # speed-up after the first token that theory expects of trees with at most 1, 2, ... nodes
    by_nodes: Sequence[float] = ()
    rates: Sequence[tuple[float, float]] = ()  # of each question, and plain decoding's
    cpu_rates: Sequence[tuple[float, float]] = ()  # the same in CPU time

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of `speedup` over the choice of questions."""
        draw, ratios = random.Random(0), []
        for _ in range(RESAMPLES if self.rates else 0):
            own, plain = zip(*draw.choices(self.rates, k=len(self.rates)), strict=True)
            ratios.append(sum(own) / sum(plain))
        ratios.sort()
        return (ratios[RESAMPLES // 40], ratios[-1 - RESAMPLES // 40]) if ratios else (0.0, 0.0)

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than plain decoding, and that is no accident of the questions."""
        return len(self.rates) > 1 and self.interval[1] < SLOWER  # one question says nothing

    @property
    def best_nodes(self) -> int:
        """The number of nodes, with the root, that theory expects to be fastest. 1: plain; 0: unknown."""
        best: int = max(range(len(self.by_nodes)), key=self.by_nodes.__getitem__, default=-1)
        return best + 1


@dataclass(frozen=True, slots=True)
class SpecRow:
    """The scores of a contender at one temperature and batch size."""

    name: str
    temperature: float
    batch: int
    scores: Mapping[str, Score]  # by task; all tasks together under `OVERALL`

    @property
    def overall(self) -> Score:
        """The score over all tasks together."""
        return self.scores[OVERALL]


class SpecResults(Journal[Lap]):
    """The laps of a journal, and the times of passes."""

    WHAT, KEY = "measurements of 'bench spec'", ("setting", "first", "turn")

    def __init__(self, conditions: Mapping[str, Any], path: Path | None = None):
        self._plain: dict[tuple[float, int, int], TurnAnswer] = {}
        self._times: dict[Setting, PassTimes] = {}
        super().__init__(conditions, path)

    def read_entry(self, entry: Mapping[str, Any]) -> None:
        """See `Journal`."""
        if PASSES in entry:
            temperature, batch, number = entry["setting"]
            (self._times[temperature, batch, number],) = parse_measurements(entry[PASSES])
        else:
            runs = {name: RunTimes(**run) for name, run in entry["runs"].items()}
            self.keep(Lap(**{**entry, "runs": runs}))

    def keep(self, record: Lap) -> None:
        """Keep a lap, and plain decoding's answers."""
        super().keep(record)
        for question, ids, text in zip(record.answered, record.answers, record.texts, strict=False):
            self._plain.setdefault((record.temperature, question, record.turn), TurnAnswer(ids, text))

    @property
    def left_out(self) -> dict[str, str]:
        """Drafters that could not be built, with the reasons."""
        return dict(self.conditions.get("left_out", {}))

    @property
    def prompts(self) -> int:
        """Number of questions that were answered."""
        return len({question for lap in self.by_key.values() for question in lap.answered})

    @property
    def skipped(self) -> int:
        """Number of turns without room in the context, and of turns after them, over all temperatures."""
        first = min((lap.batch for lap in self.by_key.values()), default=1)
        return sum(lap.left_out for lap in self.by_key.values() if (lap.batch, lap.round) == (first, 1))

    def add_times(self, setting: Setting, times: PassTimes) -> None:
        """Add the times of the target's passes, measured at this setting, also to the journal's file."""
        self._times[setting] = times
        self.write({"setting": setting, PASSES: measurements_as_json([times])})

    def plain(self, temperature: float, question: int, turn: int) -> TurnAnswer | None:
        """Return plain decoding's answer, which all contenders' answers must equal. None: not known."""
        return self._plain.get((temperature, question, turn))

    def rows(self) -> list[SpecRow]:
        """Return a row for each temperature, batch size and contender, plain decoding first."""
        settings = dict.fromkeys((lap.temperature, lap.batch) for lap in self.by_key.values())
        return [
            SpecRow(name, temperature, batch, scores)
            for temperature, batch in settings
            for name, scores in self._scores(temperature, batch).items()
        ]

    def _scores(self, temperature: float, batch: int) -> dict[str, dict[str, Score]]:
        """Compute scores by contender and task."""
        groups: dict[str, dict[int, list[Lap]]] = defaultdict(lambda: defaultdict(list))
        for lap in self.by_key.values():
            if (lap.temperature, lap.batch) == (temperature, batch) and lap.runs:
                groups[lap.task][lap.group[0]].append(lap)
        tasks = {task: [*of.values()] for task, of in groups.items()}
        tasks[OVERALL] = [laps for of in groups.values() for laps in of.values()]
        names = {name: None for laps in tasks[OVERALL] for lap in laps for name in lap.runs}
        known = [times for setting, times in self._times.items() if setting[:2] == (temperature, batch)]
        times = PassTimes.agreed(known) if known else None
        return {name: {task: _score(laps, name, times) for task, laps in tasks.items()} for name in names}


def _score(questions: Sequence[Sequence[Lap]], name: str, times: PassTimes | None) -> Score:
    """Compute the score of one contender. `questions` holds each question's laps, of all turns and rounds."""
    pairs = [(_taken(laps, name), _taken(laps, PLAIN)) for laps in questions]
    every = RunTimes.total([lap.runs[name] for laps in questions for lap in laps])
    whole, steps, later = RunTimes.total([own for own, _ in pairs]), every.steps, every.tokens - every.first
    rate, speedup = _mean_and_ratio(pairs, RunTimes.rate)
    decode_rate, decode_speedup = _mean_and_ratio(pairs, RunTimes.decode_rate)
    return Score(
        answers=every.answers,
        different=every.different,
        rate=rate,
        decode_rate=decode_rate,
        speedup=speedup,
        median_speedup=statistics.median(ratio(a.rate(), b.rate()) for a, b in pairs),
        decode_speedup=decode_speedup,
        cpu_speedup=_mean_and_ratio(pairs, RunTimes.cpu_rate)[1],
        cpu_share=ratio(whole.cpu, whole.seconds),
        accepted=ratio(later, steps - every.answers) if steps > every.answers else float(steps > 0),
        drafted=ratio(every.drafted, steps),
        phases={
            phase: 1e3 * ratio(getattr(whole, phase), whole.tokens)
            for phase in ("prefill", "draft", "verify", "other")
        },
        by_depth=[ratio(count, steps) for count in every.accepted_at],
        predicted=_predicted_speedup(pairs, times) if times else 0.0,
        by_nodes=_by_nodes(pairs, times) if times else (),
        rates=_both(pairs, RunTimes.rate),
        cpu_rates=_both(pairs, RunTimes.cpu_rate),
    )


def _taken(laps: Sequence[Lap], name: str) -> RunTimes:
    """What a question took: the sum over its turns. Of several rounds, the run of median time counts."""
    turns: dict[int, list[RunTimes]] = defaultdict(list)
    for lap in laps:
        turns[lap.turn].append(lap.runs[name])
    by_time = (sorted(runs, key=lambda run: run.seconds) for runs in turns.values())
    return RunTimes.total([runs[(len(runs) - 1) // 2] for runs in by_time])


_Pairs = Sequence[tuple[RunTimes, RunTimes]]
"""For each question, what a contender took and what plain decoding took."""


def _predicted_speedup(pairs: _Pairs, times: PassTimes) -> float:
    """Return the speed-up with the decode times that theory expects; the prompt's are as measured."""

    def seconds(drafted: RunTimes, base: RunTimes) -> float:
        if not (drafted.passes and base.passes):
            return drafted.seconds  # the whole answer came with the first token
        return drafted.prefill + predicted_seconds(base, drafted, times)

    if not any(own.passes for own, _ in pairs):
        return 0.0
    expected = [(replace(own, seconds=seconds(own, plain)), plain) for own, plain in pairs]
    return _mean_and_ratio(expected, RunTimes.rate)[1]


def _by_nodes(pairs: _Pairs, times: PassTimes) -> list[float]:
    """Return the speed-ups that theory expects of trees with at most 1, 2, ... nodes, over all questions."""
    both = [(plain, own) for own, plain in pairs if own.passes and plain.passes]
    if not both:
        return []
    base, drafted = (RunTimes.total(parts) for parts in zip(*both, strict=True))
    return speedups_by_nodes(base, drafted, times)


def _mean_and_ratio(pairs: _Pairs, rate: Callable[[RunTimes], float]) -> tuple[float, float]:
    """Return the mean of a rate, and its ratio to plain decoding's, over the questions with both above 0.

    A decode rate is 0 if the whole answer comes with its first token.
    """
    rates = _both(pairs, rate)
    if not rates:
        return 0.0, 0.0
    own_mean, plain_mean = (statistics.mean(values) for values in zip(*rates, strict=True))
    return own_mean, own_mean / plain_mean


def _both(pairs: _Pairs, rate: Callable[[RunTimes], float]) -> list[tuple[float, float]]:
    """A rate of each question, and plain decoding's, where both are above 0."""
    return [both for own, plain in pairs if all(both := (rate(own), rate(plain)))]


def by_setting(rows: Sequence[SpecRow]) -> Iterator[tuple[tuple[float, int], list[SpecRow]]]:
    """Group rows by temperature and batch size."""
    for setting in dict.fromkeys((row.temperature, row.batch) for row in rows):
        yield setting, [row for row in rows if (row.temperature, row.batch) == setting]
