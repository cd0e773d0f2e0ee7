"""Times contenders in turns, so that changes in the machine's speed affect all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def interleave(contenders: Mapping[str, Workload], rounds: int) -> Rates:
    """Run each contender once without timing, then `rounds` times in turn. Who starts rotates."""
    names = list(contenders)
    for name in names:
        contenders[name]()
    rates: dict[str, list[float]] = {name: [] for name in names}
    for first in range(rounds):
        for name in names[first % len(names) :] + names[: first % len(names)]:
            begin = time.perf_counter()
            tokens = contenders[name]()
            rates[name].append(tokens / (time.perf_counter() - begin))
    return Rates(rates)
