"""Section 3 of docs/controller.md: what a drafter's next draft is expected to gain, before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from soothsay.drafters.control.acceptance import AcceptanceCalibration
from soothsay.drafters.control.constants import (
    ACCEPTED_MEMORY,
    GAINS_WEIGHT,
    MEAN_WEIGHT,
    SHARED_MEAN_WEIGHT,
    START_ACCEPTED,
    START_DRAFTS,
    START_MISS,
)
from soothsay.drafters.control.cost import Prices
from soothsay.drafters.control.probes import NEVER, ProbeSchedule, StartInterval


class NetGain(NamedTuple):
    """What a draft is expected to gain for a request."""

    tokens: float  # accepted nodes, less the price of verifying the draft
    best: float = 0.0  # probability that the draft's best node is right

    def minus(self, price: float) -> NetGain:
        """The gain after a price in tokens."""
        return NetGain(self.tokens - price, self.best)

    def added_to(self, other: NetGain) -> float:
        """Tokens that this draft adds to another one.

        It adds what it is better by, or what it gains where the other one is wrong from its first token.
        """
        return max(self.tokens - other.tokens, self.tokens * (1 - other.best))


NO_GAIN = NetGain(0.0)


@dataclass(slots=True)
class SharedForecast:
    """Statistics of one drafter's drafts over all requests, for one signal.

    Drafts for requests that sample at a temperature above 0 have statistics of their own.
    """

    gains: list[float]  # running mean of the right nodes among the best k, by k
    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    drafts: int = 0
    start: StartInterval = field(default_factory=StartInterval)

    def new_forecast(self, step: int) -> Forecast:
        """The forecast of a new request."""
        return Forecast(self, self.gains, self.start.new_schedule(step))

    def record(self, gains: Sequence[float]) -> None:
        """Count a draft with its expected gains. The first drafts weigh more."""
        self.drafts += 1
        weight = max(SHARED_MEAN_WEIGHT, 1 / (self.drafts + 1))
        self.gains = [mean + weight * (gain - mean) for mean, gain in zip(self.gains, gains, strict=True)]


@dataclass(slots=True)
class Forecast:
    """Statistics of one drafter's drafts for one request, for one signal, and the schedule of its probes."""

    shared: SharedForecast
    gains: list[float]  # running mean of the right nodes among the best k, by k
    probes: ProbeSchedule
    expected: float = START_ACCEPTED  # nodes expected to be right; older ones fade
    right: float = START_ACCEPTED  # nodes that were right; older ones fade
    drafts: int = 0
    added: float = 0.0  # running mean of the tokens that its drafts added to the alternatives
    _net_gain: tuple[Prices, NetGain] | None = None  # the last result of `net_gain`, and its prices

    @property
    def reliability(self) -> float:
        """How much better the drafter's nodes are for this request than for all requests."""
        return self.right / self.expected

    def net_gain(self, prices: Prices) -> NetGain:
        """The expected net gain of the next draft. It is the same until a draft is recorded or checked."""
        if self.probes.next_step == NEVER:
            return NO_GAIN
        if self._net_gain is None or self._net_gain[0] is not prices:
            reliability = self.reliability
            gains = [gain * reliability for gain in self.gains]
            best = min(gains[1], 1.0) if len(gains) > 1 else 0.0
            self._net_gain = prices, NetGain(prices.best_net_gain(gains), best)
        return self._net_gain[1]

    def least_claimed(self, level_price: float, prices: Prices) -> float:
        """The drafter's own probability of the nodes below which another level pays.

        This assumes that a level's best node is right as often as the best node below a root. The price
        includes the verification of that node.
        """
        gain = min(self.gains[1] * self.reliability, 1.0)
        price = level_price + prices.node_prices[1]
        return self.shared.calibration.claimed(price / max(gain, price))

    def record(self, gains: Sequence[float]) -> None:
        """Count a draft with its expected gains. The first drafts weigh more."""
        self.shared.record(gains)
        self._net_gain = None
        self.drafts += 1
        weight = max(GAINS_WEIGHT, 1 / (self.drafts + START_DRAFTS))
        self.gains = [mean + weight * (gain - mean) for mean, gain in zip(self.gains, gains, strict=True)]

    def record_accepted(self, expected: float, right: int) -> None:
        """Count how many nodes of a draft were right, and how many were expected to be."""
        self._net_gain = None
        self.expected += expected
        self.right += right
        fade = min(1.0, ACCEPTED_MEMORY / self.expected)
        self.expected *= fade
        self.right *= fade

    def record_added(self, step: int, added: float, usual_price: float, loss: float) -> None:
        """Count what a draft added, and schedule the next probe. All values are in tokens.

        Args:
            step: the current step.
            added: what the draft adds to the alternatives.
            usual_price: of asking the drafter.
            loss: what asking it now costs with catching up, less what it is expected to add.
        """
        self.added += max(MEAN_WEIGHT, 1 / (self.drafts + 1)) * (max(added, 0.0) - self.added)
        self.probes.record(step, added > usual_price, loss)
        self.shared.start.record(self.probes.pays, loss)

    def retire(self) -> None:
        """Stop asking the drafter for this request."""
        self.probes.retire()
        self.added = 0.0


def forecast_of_nothing() -> Forecast:
    """The forecast for a drafter that would propose nothing: it is not asked until its signal changes."""
    return Forecast(SharedForecast([0.0]), [0.0], ProbeSchedule(NEVER - 1, NEVER))


def start_gains(size: int, most: float) -> list[float]:
    """Forecast gains of 0, 1, ... `size - 1` nodes, for a drafter that has not drafted yet.

    Args:
        size: length of the result.
        most: gain of many nodes.
    """
    miss = max(START_MISS, 1 - 1 / most) if most > 0 else START_MISS
    return [most * (1 - miss**k) for k in range(size)]


def gains_of(probabilities: Sequence[float], size: int) -> list[float]:
    """Right nodes expected among the best 0, 1, ... `size - 1` nodes.

    Args:
        probabilities: of the nodes, the highest first.
        size: of the result. It is padded with its last value.
    """
    gains = [*accumulate(probabilities[: size - 1], initial=0.0)]
    return gains + gains[-1:] * (size - len(gains))
