"""How everything here is timed: contenders take turns, so that a machine's moods hit all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Contender = Callable[[], int]
"""Does the work once and returns how many tokens it made."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of each contender, round by round."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """A contender's median rate."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, against: str) -> float:
        """The median over rounds of one rate over another."""
        pairs = zip(self.rounds[name], self.rounds[against], strict=True)
        return statistics.median(own / other for own, other in pairs)


def interleave(contenders: Mapping[str, Contender], rounds: int) -> Rates:
    """Run each contender once unmeasured, then `rounds` times in turn; each round begins with another."""
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
