"""Times contenders in turns, so that changes in the machine's speed affect all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int, int, int], None]
"""Called with the work done so far, all of it, and the tokens made by this run. Work is counted in answers,
conversations or seconds."""

Workload = Callable[[], int]
"""A function that does some work once and returns the number of tokens that it made."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, by contender and round."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median rate of a contender."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, against: str) -> float:
        """Return the median over rounds of one contender's rate over another's in the same round."""
        pairs = zip(self.rounds[name], self.rounds[against], strict=True)
        return statistics.median(own / other for own, other in pairs)


def rotated(contenders: Sequence[T], number: int) -> list[T]:
    """The contenders in the order of their turns in round `number`. The one that starts rotates."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def turns(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the round and the contender of each turn."""
    for number in range(rounds):
        for contender in rotated(contenders, number):
            yield number, contender


def interleave(contenders: Mapping[str, Workload], rounds: int) -> Rates:
    """Run each contender once without timing, then `rounds` times in turn."""
    for work in contenders.values():
        work()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _, name in turns(list(contenders), rounds):
        begin = time.perf_counter()
        tokens = contenders[name]()
        rates[name].append(tokens / (time.perf_counter() - begin))
    return Rates(rates)


@dataclass(slots=True)
class Meter:
    """Counts the work of a run, which may have a `limit` in seconds, and tells its progress."""

    progress: Progress
    total: float = 0
    done: float = 0
    tokens: int = 0
    limit: float = math.inf
    begin: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds until the limit. Below 0: it has passed."""
        return self.limit - (time.perf_counter() - self.begin)

    def advance(self, done: float = 0, tokens: int = 0, *, dropped: float = 0) -> None:
        """Count work that was done, and work that will not be."""
        self.done += done
        self.tokens += tokens
        self.total -= dropped
        self.progress(int(min(self.done, self.total)), math.ceil(self.total), self.tokens)
