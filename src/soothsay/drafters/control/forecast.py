"""Sections 3 and 5 of docs/controller.md: what a drafter's next draft is expected to gain, and when a drafter
that is not expected to pay is probed.

All intervals of probes are powers of two of steps, and start at multiples of themselves. So requests probe in
the same step and share the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from soothsay.drafters.control.acceptance import AcceptanceCalibration
from soothsay.drafters.control.cost import SIZES, Prices

PROBE_SHARE = 0.01
"""Share of the time that probes may take at most."""

MAX_BACK_OFF = 16
"""Probes of a drafter that never pays back off to this many times the shortest interval."""

NEW_REQUEST_BACK_OFF = 4
"""A new request starts with at most this many times the shortest interval: it may be of another kind."""


NEVER = 1 << 62
"""A step that is never reached."""


@dataclass(slots=True)
class ProbeSchedule:
    """When one drafter is probed for one request.

    An interval of 1 means that the drafter paid at its last draft. A longer one means that it pauses.
    """

    next_step: int = 0
    interval: int = 1  # steps between two probes

    @property
    def retired(self) -> bool:
        """Whether the drafter is never asked for this request again."""
        return self.next_step == NEVER

    @property
    def pays(self) -> bool:
        """Whether the drafter paid at its last draft, or was never asked."""
        return self.interval == 1

    def retire(self) -> None:
        """Stop all probes."""
        self.next_step = NEVER

    def is_due(self, step: int) -> bool:
        """Whether the drafter pauses and is to be probed in this step."""
        return self.interval > 1 and self.next_step <= step

    def stretch(self, step: int, loss: float) -> None:
        """Lengthen the interval of a drafter that pauses, if probes at this loss were too frequent."""
        if self.interval == 1 or self.retired:
            return
        if self.interval < (shortest := shortest_interval(loss)):
            self.start(step, shortest)

    def pause(self, step: int, loss: float) -> None:
        """Begin to pause, if the drafter was not pausing: its forecast has fallen below its price."""
        if self.interval == 1:
            self.start(step, shortest_interval(loss))

    def record(self, step: int, pays: bool, loss: float) -> None:
        """Set the interval after a draft: 1 if it paid. After a probe that did not pay, back off.

        Args:
            step: the current step.
            pays: whether the draft added more than the drafter's usual price.
            loss: tokens that the draft cost now, with catching up, less those that it was expected to add.
        """
        if pays:
            self.start(step, 1)
            return
        shortest = shortest_interval(loss)
        was_probe = self.next_step <= step  # otherwise it was asked because it was expected to pay
        self.start(step, min(max(self.interval << was_probe, shortest), MAX_BACK_OFF * shortest))

    def start(self, step: int, interval: int) -> None:
        """Begin an interval."""
        self.interval, self.next_step = interval, (step // interval + 1) * interval


def shortest_interval(loss: float) -> int:
    """Steps between probes that lose `loss` tokens each, and `PROBE_SHARE` of the time together."""
    return 1 << int(loss / PROBE_SHARE).bit_length()


SHARED_MEAN_WEIGHT = 0.025
"""Weight of the newest draft in running means over all requests. It is smaller because more drafts count."""

START_ACCEPTED = 8.0
"""Nodes that both counts of a new request's reliability start at. So the first drafts change it gradually."""

ACCEPTED_MEMORY = 64.0
"""Nodes that a request's reliability remembers. With few, chance alone moves it by a third, and good drafters
pause."""

APART_MEMORY = 256.0
"""Right nodes that tell how far two drafters are right at different places."""

GAINS_WEIGHT = 0.04
"""Weight of the newest draft in a request's forecast gains."""

START_DRAFTS = 16
"""Drafts that count as much in a request's forecast gains as what other requests have taught, at most."""

START_MISS = 0.7
"""A drafter that was never asked is forecast to gain `G * (1 - START_MISS**k)` with k nodes, and G with many.
If G is large, a larger number takes the place of `START_MISS`, so that no node gains more than 1."""

NO_DRAFTER = -1
"""The index of no drafter."""


class Outlook(NamedTuple):
    """What a draft is expected to do for a request."""

    net: float  # right nodes, less the price of verifying them
    gains: Sequence[float] = (0.0,)  # right nodes among the best `SIZES`
    nodes: int = 0  # how many are worth verifying
    drafter: int = NO_DRAFTER

    @property
    def best(self) -> float:
        """The probability that the best node is right."""
        return min(self.gains[1], 1.0) if len(self.gains) > 1 else 0.0

    def or_better(self, other: Outlook) -> Outlook:
        """The one with the higher net gain."""
        return other if other.net > self.net else self


NOTHING = Outlook(0.0)


@dataclass(slots=True)
class Reliability:
    """How many nodes were right, over how many were expected to be. Old evidence fades.

    Args:
        memory: number of expected nodes that count.
    """

    memory: float
    expected: float = START_ACCEPTED
    right: float = START_ACCEPTED

    @property
    def ratio(self) -> float:
        """Above 1 if more nodes are right than expected."""
        return self.right / self.expected

    def record(self, expected: float, right: int) -> None:
        """Count nodes."""
        self.expected += expected
        self.right += right
        fade = min(1.0, self.memory / self.expected)
        self.expected *= fade
        self.right *= fade


@dataclass(slots=True)
class SharedForecast:
    """Statistics of one drafter's drafts over all requests, for one signal.

    Drafts for requests that sample at a temperature above 0 have statistics of their own.
    """

    gains: list[float]  # running means of the right nodes among the best `SIZES`
    drafter: int = NO_DRAFTER
    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    drafts: int = 0
    start_interval: int = 1  # that new requests begin with, learned from drafts for all requests
    apart: dict[int, Reliability] = field(default_factory=dict)
    """By another drafter: how many nodes are right where its draft is wrong from its first token, over how
    many would be if the two drafts had nothing to do with each other."""

    def new_forecast(self, step: int) -> Forecast:
        """The forecast of a new request."""
        probes = ProbeSchedule()
        if self.start_interval > 1:
            probes.start(step, self.start_interval)
        return Forecast(self, self.gains, probes, known=min(self.drafts, START_DRAFTS))

    def record(self, gains: Sequence[float]) -> None:
        """Count a draft with its expected gains. The first drafts weigh more."""
        self.drafts += 1
        weight = max(SHARED_MEAN_WEIGHT, 2 / (self.drafts + 2))
        self.gains = [mean + weight * (gain - mean) for mean, gain in zip(self.gains, gains, strict=False)]

    def record_apart(self, drafter: int, best: float, right: int, is_alone: bool) -> None:
        """Count a draft of which `right` nodes were right beside a draft of another drafter.

        Args:
            drafter: the other one.
            best: the probability that its draft's best node is right.
            right: nodes.
            is_alone: whether its draft was wrong from its first token.
        """
        apart = self.apart.get(drafter)
        if apart is None:
            apart = self.apart[drafter] = Reliability(APART_MEMORY)
        apart.record(right * (1 - best), right if is_alone else 0)


@dataclass(slots=True)
class Forecast:
    """Statistics of one drafter's drafts for one request, for one signal, and the schedule of its probes."""

    shared: SharedForecast
    gains: list[float]  # running means of the right nodes among the best `SIZES`
    probes: ProbeSchedule
    reliability: Reliability = field(default_factory=lambda: Reliability(ACCEPTED_MEMORY))
    """How much better the drafter's nodes are for this request than for all requests."""
    known: int = 0  # drafts that the first gains count for
    drafts: int = 0
    _outlook: tuple[Prices, Outlook] | None = None  # the last result of `outlook`, and its prices

    def outlook(self, prices: Prices) -> Outlook:
        """What the next draft is expected to do. It is the same until a draft is recorded or checked."""
        if self.probes.next_step == NEVER:
            return NOTHING
        if self._outlook is None or self._outlook[0] is not prices:
            ratio = self.reliability.ratio
            self._outlook = prices, self.outlook_of([gain * ratio for gain in self.gains], prices)
        return self._outlook[1]

    def outlook_of(self, gains: Sequence[float], prices: Prices) -> Outlook:
        """The outlook of a draft with these right nodes among its best `SIZES`."""
        net, nodes = prices.best_net_gain(gains)
        return Outlook(net, gains, nodes, self.shared.drafter)

    def added_to(self, other: Outlook, own: Outlook, prices: Prices) -> float:
        """Tokens that a draft of this drafter adds to another draft.

        It replaces the other one, or is verified beside it: then it gains something where the other one is
        wrong from its first token, and its nodes come after those of the other one.
        """
        if other is NOTHING:
            return own.net
        apart = self.shared.apart.get(other.drafter)
        alone = min((1 - other.best) * (1.0 if apart is None else apart.ratio), 1.0)
        beside = max(prices.net_gains([alone * gain for gain in own.gains], other.nodes))
        return max(own.net - other.net, beside + prices.node_prices[other.nodes])

    def least_claimed(self, level_price: float, prices: Prices) -> float:
        """The drafter's own probability of the nodes below which another level pays.

        This assumes that a level's best node is right as often as the best node below a root. The price
        includes the verification of that node.
        """
        gain = min(self.gains[1] * self.reliability.ratio, 1.0)
        price = level_price + prices.node_prices[1]
        return self.shared.calibration.claimed(price / max(gain, price))

    def record(self, gains: Sequence[float]) -> None:
        """Count a draft with its expected gains. The first drafts weigh more."""
        self.shared.record(gains)
        self._outlook = None
        self.drafts += 1
        weight = max(GAINS_WEIGHT, 2 / (2 * self.known + self.drafts + 2))
        self.gains = [mean + weight * (gain - mean) for mean, gain in zip(self.gains, gains, strict=False)]

    def record_accepted(self, expected: float, right: int) -> None:
        """Count how many nodes of a draft were right, and how many were expected to be."""
        self._outlook = None
        self.reliability.record(expected, right)

    def record_added(self, step: int, added: float, usual_price: float, loss: float) -> None:
        """Schedule the next probe by what a draft added. All values are in tokens.

        Args:
            step: the current step.
            added: what the draft adds to the alternatives.
            usual_price: of asking the drafter.
            loss: what asking it now costs with catching up, less what it is expected to add.
        """
        self.probes.record(step, added > usual_price, loss)
        shared, shortest = self.shared, shortest_interval(loss)
        longer = min(max(2 * shared.start_interval, shortest), NEW_REQUEST_BACK_OFF * shortest)
        shared.start_interval = 1 if self.probes.pays else longer


def forecast_of_nothing() -> Forecast:
    """The forecast for a drafter that would propose nothing: it is not asked until its signal changes."""
    return Forecast(SharedForecast([0.0]), [0.0], ProbeSchedule(NEVER - 1, NEVER))


def start_gains(size: int, most: float) -> list[float]:
    """Forecast gains of `SIZES` nodes, for a drafter that has not drafted yet.

    Args:
        size: nodes of its largest tree, the root included.
        most: gain of many nodes.
    """
    miss = max(START_MISS, 1 - 1 / most) if most > 0 else START_MISS
    return [most * (1 - miss**k) for k in SIZES if k < size]


def gains_of(probabilities: Sequence[float]) -> list[float]:
    """Right nodes expected among the best `SIZES` nodes.

    `probabilities` are those of the nodes, the highest first.
    """
    gains = [*accumulate(probabilities, initial=0.0)]
    last = len(gains) - 1
    return [gains[size if size < last else last] for size in SIZES]
