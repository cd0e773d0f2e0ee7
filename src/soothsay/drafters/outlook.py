"""What a controller knows of its drafters: what they cost, what they bring, and when to try them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from soothsay.engine.calibration import Calibration

RECENT = 0.1
"""Weight of the newest step in running means of a request."""

PROBE_SHARE = 0.01
"""Of the time, at most, for asking drafters that are not expected to pay."""

NEVER = 1 << 62
"""A step that does not come."""

SELDOM = 16
"""In the end, one that never pays takes that share divided by this."""

ANEW = 4
"""Likewise, for requests that are new: they may be of another kind."""


class Cost:
    """Seconds that a drafter takes for a step, by how many requests it is asked for."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the number of requests' bits

    def record(self, requests: int, seconds: float) -> None:
        """Count a step; a stolen moment of the machine, or the reading of a prompt, counts little."""
        key = requests.bit_length()
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
        else:
            self._seconds[key] = known + 0.2 * (min(seconds, 1.25 * known) - known)

    def __call__(self, requests: int) -> float:
        """An estimate; 0 as long as nothing is known."""
        if not self._seconds:
            return 0.0
        key = requests.bit_length()
        if (known := self._seconds.get(key)) is not None:
            return known
        nearest = min(self._seconds, key=lambda known: abs(known - key))
        return self._seconds[nearest] * 2.0 ** min(max(key - nearest, 0), 8)


@dataclass(frozen=True, slots=True)
class Market:
    """What things cost for a while, in tokens: those that the same time could have brought otherwise.

    Lists, not arrays: they are short, and are gone through for each request at each step.
    """

    rate: float  # tokens a second, of all requests together
    passes: list[float]  # seconds of a pass with 0, 1, ... nodes, of all requests together
    prices: list[float]  # of 0, 1, ... nodes for each request

    def call(self, seconds: float) -> float:
        """The price of time."""
        return self.rate * seconds

    def best(self, gains: Iterable[float]) -> float:
        """The most that gains of 0, 1, ... nodes exceed their prices by."""
        most: float = max(map(sub, gains, self.prices))
        return most


class Worth(NamedTuple):
    """What guesses are worth to a request."""

    tokens: float  # expected, less the cost of verifying them
    first: float = 0.0  # probability that the first of them is right

    def less(self, price: float) -> Worth:
        """After its price is paid."""
        return Worth(self.tokens - price, self.first)

    def beyond(self, other: Worth) -> float:
        """What they add to others: they are better, or right where the others are wrong at once."""
        return max(self.tokens - other.tokens, self.tokens * (1 - other.first))


NOTHING = Worth(0.0)


@dataclass(slots=True)
class Record:
    """What is known of one drafter's guesses of a kind, over all requests."""

    gains: list[float]  # guesses right among the best k nodes, by k, on average
    calibration: Calibration = field(default_factory=Calibration)
    levels: float = 1.0  # of its trees, on average
    pause: int = 1  # that a new request begins with
    asked: int = 0  # times

    def outlook(self, step: int) -> Outlook:
        """What a new request begins with; where it has not paid of late, with a pause."""
        next_ = 0 if self.pause == 1 else (step // self.pause + 1) * self.pause
        return Outlook(self, self.gains, next=next_, pause=self.pause)

    def plan(self, pays: bool, shortest: int) -> None:
        """Say how new requests begin, after one for which the drafter has just been asked."""
        self.pause = 1 if pays else min(max(2 * self.pause, shortest), ANEW * shortest)

    def learn(self, gains: Sequence[float], depth: int) -> None:
        """Count what a tree of some depth is expected to bring; the first few count more."""
        self.levels += RECENT * (max(depth, 1) - self.levels)
        self.asked += 1
        self.gains = _moved(self.gains, gains, max(RECENT / 4, 1 / (self.asked + 1)))


@dataclass(slots=True)
class Outlook:
    """What is known of one drafter's guesses of a kind for one request."""

    record: Record
    gains: list[float]  # as above, of this request
    expected: float = 2.0  # guesses right, as they were calibrated: of late, and two to begin with
    right: float = 2.0  # guesses right, in truth
    asked: int = 0  # times
    surplus: float = 0.0  # by how much its trees exceed what could be had without it, on average
    next: int = 0  # step at which it is asked whatever is expected
    pause: int = 1  # steps from one such time to the next
    _hope: tuple[Market, Worth] | None = None  # what `hope` has said of late

    @property
    def trust(self) -> float:
        """By how much its guesses are better here than elsewhere."""
        return self.right / self.expected

    @property
    def gone(self) -> bool:
        """Whether it has left."""
        return self.next == NEVER

    def leave(self) -> None:
        """It is not asked any more."""
        self.next, self.surplus = NEVER, 0.0

    def hope(self, market: Market) -> Worth:
        """What its next guesses are expected to be worth."""
        if self.gone:
            return NOTHING
        if self._hope is None or self._hope[0] is not market:
            trust = self.trust
            gains = [gain * trust for gain in self.gains]
            worth = Worth(market.best(gains), min(gains[1], 1.0) if len(gains) > 1 else 0.0)
            self._hope = market, worth
        return self._hope[1]

    def learn(self, gains: Sequence[float], depth: int) -> None:
        """Count what a tree of some depth is expected to bring."""
        self.record.learn(gains, depth)
        self._hope = None
        self.asked += 1
        self.gains = _moved(self.gains, gains, max(RECENT, 1 / (self.asked + 4)))

    def settle(self, expected: float, right: int) -> None:
        """Count what has become of a tree."""
        self._hope = None
        self.expected += RECENT * (expected - self.expected)
        self.right += RECENT * (right - self.right)

    def put_off(self, step: int, price: float) -> None:
        """See to it that tries at such a price are rare enough."""
        if not self.gone and 1 < self.pause < (shortest := _shortest(price)):
            self._wait(step, shortest)

    def wait(self, step: int, price: float) -> None:
        """It is not worth its price at the moment."""
        if self.pause == 1:
            self._wait(step, _shortest(price))

    def plan(self, step: int, surplus: float, price: float, spent: float) -> None:
        """Count what asking has brought; and say when to ask again, whatever is expected. All in tokens.

        A drafter that does not pay pauses, each time longer. Pauses are powers of two, so that requests try
        together.

        Args:
            step: this one.
            surplus: what its guesses add.
            price: what asking costs as a rule.
            spent: what it has cost now, with all that the drafter had to catch up with.
        """
        self.surplus += max(RECENT, 1 / (self.asked + 1)) * (max(surplus, 0.0) - self.surplus)
        shortest = _shortest(spent)
        if surplus > price:
            self._wait(step, 1)
        else:
            tried = self.next <= step  # and not asked because it was expected to pay
            self._wait(step, min(max(self.pause << tried, shortest), SELDOM * shortest))
        self.record.plan(self.pause == 1, shortest)

    def _wait(self, step: int, pause: int) -> None:
        self.pause, self.next = pause, (step // pause + 1) * pause


def _shortest(price: float) -> int:
    """Steps from one try to the next, at such a price in tokens."""
    return 1 << int(price / PROBE_SHARE).bit_length()


def unknown_gains(size: int) -> list[float]:
    """What is expected of a drafter before anything is known: it shall be tried."""
    return [2.0 * (1 - 0.7**k) for k in range(size)]


def gains_of(best: Sequence[float], size: int) -> list[float]:
    """Guesses expected to be right among the best 0, 1, ... `size - 1` nodes, by their probabilities, which
    fall."""
    gains = [*accumulate(best[: size - 1], initial=0.0)]
    return gains + gains[-1:] * (size - len(gains))


def _moved(means: Sequence[float], values: Sequence[float], weight: float) -> list[float]:
    return [mean + weight * (value - mean) for mean, value in zip(means, values, strict=True)]
