"""Section 2 of docs/controller.md: what passes and drafters cost, in seconds and in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from soothsay.core.request import Observation, Request
from soothsay.model.timing.pass_times import PassTimes

COST_WEIGHT = 0.2
"""Weight of the newest measurement in the running mean of a cost."""

COST_CAP = 1.25
"""A measurement counts at most this many times the mean. A step that the machine delayed, or in which a
drafter read a prompt, then hardly moves the mean."""

LEVELS_WEIGHT = 0.05
"""Weight of the newest draft in what tells the time of a level. A slope needs more drafts than a mean."""

LEVELS_PRIOR = 0.02
"""Variance of levels, at which the belief that all of a draft's time is that of levels counts for half."""

MAX_DOUBLINGS = 8
"""Powers of two over which a cost is extrapolated to larger batches, at most."""

MEAN_WEIGHT = 0.1
"""Weight of the newest step in the rate."""

FOLLOW_INTERVAL = 0.05
"""Seconds between two comparisons of a pass's time with the known times. A comparison takes 150 microseconds
with cold caches: one in 0.02 s was 1% of the time of a model with passes of 3 ms."""

PRICE_STEPS = 16
"""Steps for which prices stay the same while the batch stays the same."""

PRICE_CONTEXT = 64
"""Tokens of context within which prices stay the same. Attention to this many tokens costs little."""

START_LEVEL_PRICE = 0.25
"""Tokens that a level of a draft is taken to cost before any was measured, which is about a draft model's. So
the first drafts are about as deep as the later ones."""


SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of nodes whose gains are forecast. All of them move with each draft, so there are few."""


class RunningCost:
    """Running mean of the seconds that an activity takes in a step, by the number of requests.

    The first time does not count: it may take many times as long as those that follow.
    """

    def __init__(self) -> None:
        self._was_done = False
        self._seconds: dict[int, float] = {}  # number of bits of the number of requests -> seconds

    def record(self, requests: int, seconds: float, usual: float = 1.0) -> None:
        """Count a step in which the activity was done for `requests`. Long outliers count little.

        `usual` is how many times the mean this step's activity is expected to take.
        """
        if not self._was_done:
            self._was_done = True
            return
        key = requests.bit_length()
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
        else:
            self._seconds[key] = known + COST_WEIGHT * (min(seconds, COST_CAP * known * usual) - known)

    def __call__(self, requests: int) -> float:
        """Estimated seconds for `requests`; 0 if nothing was measured yet."""
        key = requests.bit_length()
        if (known := self._seconds.get(key)) is not None:
            return known
        if not self._seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda known: abs(known - key))
        return self._seconds[nearest] * 2.0 ** min(max(key - nearest, 0), MAX_DOUBLINGS)


@dataclass(slots=True)
class LevelShare:
    """The share of a usual draft's time that one more level takes, by exponentially weighted least squares.

    A part of the time is the same for any number of levels: a drafter reads committed tokens, for example.
    Until drafts of different depths have been seen, all of it counts as the time of levels.
    """

    levels: float = 0.0  # running mean of a draft's levels; 0: no draft was seen yet
    variance: float = 0.0  # of the levels
    covariance: float = 0.0  # of the levels, and the time as a share of a usual draft's

    def __call__(self) -> float:
        """The share; 0 if no draft was seen yet."""
        if not self.levels:
            return 0.0
        share = (self.covariance + LEVELS_PRIOR / self.levels) / (self.variance + LEVELS_PRIOR)
        return min(max(share, 0.0), 1 / self.levels)

    def usual(self, levels: int) -> float:
        """How many times a usual draft's time a draft of `levels` is expected to take."""
        return 1 + self() * (levels - self.levels) if self.levels else 1.0

    def record(self, levels: int, share: float) -> None:
        """Count a draft that took `share` of a usual draft's time."""
        if not self.levels:
            self.levels = float(levels)
            return
        more, over = levels - self.levels, min(share, COST_CAP * self.usual(levels)) - 1
        self.levels += LEVELS_WEIGHT * more
        self.variance += LEVELS_WEIGHT * (more * more - self.variance)
        self.covariance += LEVELS_WEIGHT * (more * over - self.covariance)


@dataclass(frozen=True, slots=True)
class Prices:
    """What seconds and nodes cost for some steps, in tokens that the batch could produce instead.

    Lists and not arrays: they are short, and Python reads them once for each request and drafter.
    """

    rate: float  # tokens per second of the whole batch
    pass_seconds: list[float]  # of a pass with 0, 1, ... nodes in the whole batch
    node_prices: list[float]  # tokens per request for 0, 1, ... nodes of each active request

    def of_seconds(self, seconds: float) -> float:
        """The price of some seconds, in tokens."""
        return self.rate * seconds

    def best_net_gain(self, gains: Iterable[float]) -> tuple[float, int]:
        """The largest difference of the gain of `SIZES` nodes and their price, and its number of nodes."""
        net_gains = self.net_gains(gains, 0)
        best = max(net_gains)
        return best, SIZES[net_gains.index(best)]

    def net_gains(self, gains: Iterable[float], taken: int) -> list[float]:
        """What `SIZES` nodes gain, less their price after `taken` others."""
        prices, most = self.node_prices, len(self.node_prices) - taken
        return [gain - prices[taken + size] for gain, size in zip(gains, SIZES, strict=False) if size < most]


class CostModel:
    """Times the parts of each step, and sets the prices.

    Args:
        num_drafters: drafters of the controller.
        times: returns the times of the target's passes. Better ones may be measured in idle time.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, num_drafters: int, times: Callable[[], PassTimes], clock: Callable[[], float]):
        self._load_times, self._clock = times, clock
        self._times: PassTimes | None = None  # that `prices` are made of
        self.drafting = [RunningCost() for _ in range(num_drafters)]  # of a draft
        self._level_shares = [LevelShare() for _ in range(num_drafters)]
        self.deciding = RunningCost()  # of the controller itself, for each drafter that it asks
        self.polling = RunningCost()
        self.batch = 0  # requests in the step
        self._served = set[Request]()  # the requests of the last step
        self.rows = self.nodes = 0  # of the step's pass: without draft tokens, and draft tokens
        self.rate = 0.0  # running mean of tokens per second at this batch size; 0: not measured yet
        self.prices: Prices | None = None  # those of the last decision
        self._priced: tuple[int, ...] | None = None  # the situation that they are for
        self._proposing = [0.0] * num_drafters  # seconds of `propose` in this step, for each drafter
        self.proposing = 0.0  # their sum, in this step
        self._asked = 0  # drafters, in this step
        self._outside = 0.0  # seconds of polling, catching up and proposing in this step
        self._begin = self._end = self._passed = 0.0  # begin and end of this step's decision, end of its pass
        self._followed = 0.0  # the begin of the last step whose pass was compared with `times`

    @property
    def times(self) -> PassTimes:
        """The times of the target's passes."""
        if self._times is None:
            self._times = self._load_times()
        return self._times

    def target_reading(self) -> float:
        """Seconds in which the target reads a token of a prompt."""
        rows = self.times.rows[-1]
        return self.times(rows) / rows

    def begin_step(self) -> None:
        """Begin the decision of a step."""
        self._begin, self._outside, self.proposing, self._asked, self.nodes = self._clock(), 0.0, 0.0, 0, 0
        if self._begin - self._followed >= FOLLOW_INTERVAL:
            self._followed = self._begin

    def serves(self, requests: Sequence[Request]) -> bool:
        """Whether these are about as many requests as in the last step awake, and some of them were in it."""
        count = len(requests)
        return self.batch < 2 * count < 4 * self.batch and not self._served.isdisjoint(requests)

    def set_batch(self, requests: Sequence[Request]) -> bool:
        """Note the requests of this step. Returns whether their number has changed.

        The rate begins anew then, and also if all requests are new: their texts may be harder to guess.
        """
        changed = len(requests) != self.batch
        if changed or self._served.isdisjoint(requests):
            self.batch, self.rate = len(requests), 0.0
        self._served = set(requests)
        self.rows = sum([request.length - request.cached for request in requests])
        return changed

    def set_prices(self, step: int, active: Sequence[Request]) -> Prices:
        """The prices of this step. They stay the same object while the situation is about the same."""
        n, tokens, nodes = len(active), 0, 0
        for request in active:
            tokens += request.length
            nodes = max(nodes, request.max_nodes - 1)
        context = tokens / n
        situation = (self.rows, self.batch, n, nodes, int(context / PRICE_CONTEXT), step // PRICE_STEPS)
        if self.prices is None or self._priced != situation:
            self._times = self._load_times()
            seconds = self.times.span(self.rows, nodes * n, context, self.batch)
            rate = max(self.batch / seconds[0], self.rate)
            node_prices = [(more - seconds[0]) * (rate / n) for more in seconds[::n]]
            self._priced = situation
            self.prices = Prices(rate, seconds, node_prices)
        return self.prices

    def asking(self, drafter: int, requests: int) -> float:
        """Seconds to ask a drafter for `requests`, and to decide what to do with its drafts."""
        return self.drafting[drafter](requests) + self.deciding(requests)

    def price_per_request(self, drafter: int, prices: Prices) -> float:
        """Tokens per request if a drafter is asked for the whole batch."""
        return prices.of_seconds(self.asking(drafter, self.batch)) / self.batch

    def record_polling(self, requests: int, seconds: float) -> None:
        """Count the seconds of polling some requests."""
        self.polling.record(requests, seconds)
        self._outside += seconds

    def leave_out(self, seconds: float) -> None:
        """Note seconds that are no part of this step, since they come once for each request.

        The step's pass is not compared with `times` then.
        """
        self._begin += seconds

    def record_proposing(self, drafter: int, proposing: float, total: float) -> None:
        """Note a drafter's seconds in this step: to propose, and in total with catching up before."""
        self._proposing[drafter] = proposing
        self.proposing += proposing
        self._outside += total
        self._asked += 1

    def end_decision(self, active: int) -> None:
        """Count the time that the decision took, for each drafter that was asked."""
        self._end = self._clock()
        if self._asked:
            self.deciding.record(active, (self._end - self._begin - self._outside) / self._asked)

    def end_drafting(self, drafter: int, requests: int, began_observing: float, levels: int = 1) -> None:
        """Count the whole time of a drafter in this step: to propose, and to observe until now.

        `levels` is the number of levels that it computed one after the other.
        """
        seconds = self._proposing[drafter] + self._clock() - began_observing
        share, mean = self._level_shares[drafter], self.drafting[drafter](requests)
        self.drafting[drafter].record(requests, seconds, share.usual(levels))
        share.record(levels, seconds / mean if mean else 1.0)

    def level_price(self, drafter: int, requests: int, prices: Prices) -> float:
        """Tokens per request that a level of a draft costs; a first estimate if none was measured yet."""
        seconds = self.drafting[drafter](requests)
        if not seconds:
            return START_LEVEL_PRICE
        return prices.of_seconds(seconds * self._level_shares[drafter]()) / requests

    def follow_pass(self, observations: Sequence[Observation], experts: float | None) -> None:
        """Compare the time of this step's pass with `times`, if it is this step's turn.

        `experts` is how many experts a layer ran on average; None: no layer has experts.
        """
        self._passed = self._clock()
        if self._followed != self._begin:
            return
        if None in [seen.verdict for seen in observations]:
            return  # rows of prompt chunks are not in `rows`
        count, seconds = len(observations), max(self._passed - self._end, 1e-9)
        context = sum([seen.request.length for seen in observations]) / count
        self.times.follow(self.rows + self.nodes, context, seconds, experts, count)

    def end_step(self, observations: Sequence[Observation]) -> float:
        """Count the tokens per second of this step.

        Returns what being awake has earned, in passes of plain decoding: the draft tokens that were accepted,
        less the time of nodes, drafters and decisions.
        """
        tokens = [len(seen.verdict.tokens) for seen in observations if seen.verdict is not None]
        now, more = self._clock(), 0.0
        rate = sum(tokens) / max(now - self._begin, 1e-9)
        self.rate = self.rate + MEAN_WEIGHT * (rate - self.rate) if self.rate else rate
        if not tokens:
            return 0.0
        if self.nodes and self.prices is not None:
            more = self.prices.pass_seconds[self.nodes] - self.prices.pass_seconds[0]
        own = self._end - self._begin + now - self._passed
        plain = max(self._passed - self._end - more, 1e-9)
        return (sum(tokens) - len(tokens)) / len(observations) - (own + more) / plain
