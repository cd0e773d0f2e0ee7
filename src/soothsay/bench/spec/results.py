"""What was measured on Spec-Bench, and what it adds up to."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soothsay.bench.journal import Journal
from soothsay.bench.spec.contenders import Answer, Run, added
from soothsay.errors import SoothsayError

PLAIN = "none"
OVERALL = "overall"

Setting = tuple[float, int, int]
"""Temperature, batch, round."""

Key = tuple[Setting, int, int]
"""A setting, the first question of a group, a turn."""


@dataclass(frozen=True, slots=True)
class Lap:
    """A turn of a group of questions, answered by all contenders one after the other."""

    temperature: float
    batch: int  # questions of a group, answered at once; the last group of a task may have fewer
    round: int  # from 1
    task: str
    group: list[int]  # questions, by their numbers
    turn: int  # from 0
    answered: list[int]  # of the group, those that have such a turn, and room for it
    left_out: int  # turns without room, and those behind them
    runs: dict[str, Run]  # by contender
    answers: list[list[int]] = field(default_factory=list)  # plain decoding's, where they are the first
    texts: list[str] = field(default_factory=list)  # of these answers

    @property
    def key(self) -> Key:
        """What was measured."""
        return (self.temperature, self.batch, self.round), self.group[0], self.turn


@dataclass(frozen=True, slots=True)
class Score:
    """What a contender did in a task. Speed-ups are over plain decoding in the same laps."""

    answers: int
    different: int | None  # of them, from plain decoding's: must be 0. None: not compared
    rate: float  # tokens a second, the mean over questions
    decode_rate: float  # the same behind the first token
    speedup: float  # of `rate`: the leaderboard's
    median_speedup: float  # the median over questions of one rate over the other
    decode_speedup: float  # of `decode_rate`
    cpu_speedup: float  # as `speedup`, by the time that this process had of the processor; 0: unknown
    cpu_share: float  # of the time, in which the machine did not do something else
    accepted: float  # tokens a step, the bonus counted and the pass over the prompt not; 0: unknown
    drafted: float  # nodes a step
    phases: Mapping[str, float]  # milliseconds a token: prefill, draft, verify, other
    by_depth: Sequence[float]  # share of steps that accepted a guess so deep: first guess, second, ...


@dataclass(frozen=True, slots=True)
class Row:
    """A contender at a temperature and a batch."""

    name: str
    temperature: float
    batch: int
    scores: Mapping[str, Score]  # by task, and of all together under `OVERALL`

    @property
    def overall(self) -> Score:
        """Of all tasks together."""
        return self.scores[OVERALL]


class Results:
    """Laps in a journal.

    Raises `SoothsayError` if an entry is no lap.
    """

    def __init__(self, journal: Journal):
        self.journal = journal
        self._laps: dict[Key, Lap] = {}
        self._plain: dict[tuple[float, int, int], Answer] = {}
        for entry in journal.entries:
            try:
                runs = {name: Run(**run) for name, run in entry["runs"].items()}
                self._keep(Lap(**{**entry, "runs": runs}))
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise SoothsayError(f"measurements of 'bench spec' are expected ({error!r})") from None

    @classmethod
    def read(cls, path: Path) -> Results:
        """What a file holds. Raises `SoothsayError` if it holds something else."""
        try:
            return cls(Journal.read(path))
        except SoothsayError as error:
            raise SoothsayError(f"{path}: {error}") from None

    @property
    def conditions(self) -> dict[str, Any]:
        """Under which all was measured."""
        return self.journal.conditions

    @property
    def left_out(self) -> dict[str, str]:
        """Drafters that could not be built, and why."""
        return dict(self.conditions.get("left_out", {}))

    @property
    def skipped(self) -> int:
        """Turns that the context has no room for, and those behind them, at all temperatures."""
        first = min((lap.batch for lap in self._laps.values()), default=1)
        return sum(lap.left_out for lap in self._laps.values() if (lap.batch, lap.round) == (first, 1))

    def get(self, key: Key) -> Lap | None:
        """A lap that is there."""
        return self._laps.get(key)

    def add(self, lap: Lap) -> None:
        """Keep a lap, in the file too."""
        self._keep(lap)
        self.journal.add(asdict(lap))

    def plain(self, temperature: float, question: int, turn: int) -> Answer | None:
        """Plain decoding's answer, which all others must equal."""
        return self._plain.get((temperature, question, turn))

    def _keep(self, lap: Lap) -> None:
        self._laps[lap.key] = lap
        for question, ids, text in zip(lap.answered, lap.answers, lap.texts, strict=False):
            self._plain.setdefault((lap.temperature, question, lap.turn), Answer(ids, text))

    def rows(self) -> list[Row]:
        """All contenders, plain decoding first, by temperature and batch."""
        settings = dict.fromkeys((lap.temperature, lap.batch) for lap in self._laps.values())
        return [
            Row(name, temperature, batch, scores)
            for temperature, batch in settings
            for name, scores in self._scores(temperature, batch).items()
        ]

    def _scores(self, temperature: float, batch: int) -> dict[str, dict[str, Score]]:
        """By contender and task."""
        groups: dict[str, dict[int, list[Lap]]] = defaultdict(lambda: defaultdict(list))
        for lap in self._laps.values():
            if (lap.temperature, lap.batch) == (temperature, batch) and lap.runs:
                groups[lap.task][lap.group[0]].append(lap)
        tasks = {task: [*of.values()] for task, of in groups.items()}
        tasks[OVERALL] = [laps for of in groups.values() for laps in of.values()]
        names = {name: None for laps in tasks[OVERALL] for lap in laps for name in lap.runs}
        return {name: {task: _score(laps, name) for task, laps in tasks.items()} for name in names}


def _score(questions: Sequence[Sequence[Lap]], name: str) -> Score:
    """Of one contender; each question has its laps of all turns and rounds."""
    own, plain = ([_Taken.of(laps, who) for laps in questions] for who in (name, PLAIN))
    runs = [lap.runs[name] for laps in questions for lap in laps]
    compared = [run.different for run in runs if run.different is not None]
    rate, plain_rate = _means(own, plain, _Taken.rate)
    decode_rate, plain_decode_rate = _means(own, plain, _Taken.decode_rate)
    cpu_rate, plain_cpu_rate = _means(own, plain, _Taken.cpu_rate)
    answers, steps = sum(run.answers for run in runs), sum(run.steps for run in runs)
    behind = sum(run.tokens - run.first for run in runs)
    tokens = sum(taken.tokens for taken in own)
    return Score(
        answers=answers,
        different=sum(compared) if compared else None,
        rate=rate,
        decode_rate=decode_rate,
        speedup=_ratio(rate, plain_rate),
        median_speedup=statistics.median(_ratio(a.rate(), b.rate()) for a, b in zip(own, plain, strict=True)),
        decode_speedup=_ratio(decode_rate, plain_decode_rate),
        cpu_speedup=_ratio(cpu_rate, plain_cpu_rate),
        cpu_share=_ratio(sum(taken.cpu for taken in own), sum(taken.seconds for taken in own)),
        accepted=_ratio(behind, steps - answers) if steps > answers else float(steps > 0),
        drafted=_ratio(sum(run.drafted for run in runs), steps),
        phases={
            phase: 1e3 * _ratio(sum(getattr(taken, phase) for taken in own), tokens)
            for phase in ("prefill", "draft", "verify", "other")
        },
        by_depth=[_ratio(count, steps) for count in added([run.accepted_at for run in runs])],
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a question took: sums over turns of medians over rounds. Times are in seconds."""

    tokens: int
    ahead: int  # of them, those that came with the prompt
    seconds: float
    cpu: float
    prefill: float
    draft: float
    verify: float

    @property
    def other(self) -> float:
        """Scheduling, text, and all else behind the first token."""
        return max(self.seconds - self.prefill - self.draft - self.verify, 0.0)

    def rate(self) -> float:
        """Tokens a second."""
        return _ratio(self.tokens, self.seconds)

    def decode_rate(self) -> float:
        """Tokens a second behind the first; 0 if there are none."""
        return _ratio(self.tokens - self.ahead, self.seconds - self.prefill)

    def cpu_rate(self) -> float:
        """Tokens a second of the processor's."""
        return _ratio(self.tokens, self.cpu)

    @classmethod
    def of(cls, laps: Sequence[Lap], name: str) -> _Taken:
        turns: dict[int, list[Run]] = defaultdict(list)
        for lap in laps:
            turns[lap.turn].append(lap.runs[name])

        def total(part: Callable[[Run], float]) -> float:
            return sum(statistics.median(part(run) for run in runs) for runs in turns.values())

        return cls(
            tokens=sum(runs[0].tokens for runs in turns.values()),
            ahead=sum(runs[0].ahead for runs in turns.values()),
            seconds=total(lambda run: run.seconds),
            cpu=total(lambda run: run.cpu),
            prefill=total(lambda run: run.prefill),
            draft=total(lambda run: run.draft),
            verify=total(lambda run: run.verify),
        )


def _means(
    own: Sequence[_Taken], plain: Sequence[_Taken], rate: Callable[[_Taken], float]
) -> tuple[float, float]:
    """Over the questions that have such a rate with both: an answer that comes whole with its first token
    has none behind it."""
    pairs = [pair for one, other in zip(own, plain, strict=True) if all(pair := (rate(one), rate(other)))]
    return (
        (statistics.mean(a for a, _ in pairs), statistics.mean(b for _, b in pairs)) if pairs else (0.0, 0.0)
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def by_setting(rows: Sequence[Row]) -> Iterator[tuple[tuple[float, int], list[Row]]]:
    """Rows of the same temperature and batch together."""
    for setting in dict.fromkeys((row.temperature, row.batch) for row in rows):
        yield setting, [row for row in rows if (row.temperature, row.batch) == setting]
