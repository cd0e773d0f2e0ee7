"""Section 2 of docs/controller.md: what passes and drafters cost, in seconds and in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub

import numpy as np

from soothsay.core.request import Request
from soothsay.drafters.base import Observation
from soothsay.drafters.control.constants import (
    COST_CAP,
    COST_WEIGHT,
    FOLLOW_INTERVAL,
    LEVELS_PRIOR,
    LEVELS_WEIGHT,
    MAX_DOUBLINGS,
    MEAN_WEIGHT,
    PRICE_CONTEXT,
    PRICE_STEPS,
    START_LEVEL_PRICE,
)
from soothsay.model.pass_times import PassTimes


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
    """What seconds and nodes cost a tenant for some steps, in tokens that the batch could produce instead.

    Lists and not arrays: they are short, and Python reads them once for each request and drafter.
    """

    rate: float  # tokens per second of the whole batch
    pass_seconds: list[float]  # of a pass with 0, 1, ... nodes of the tenant's requests together
    node_prices: list[float]  # tokens per request for 0, 1, ... nodes of each active request
    scale: float = 1.0  # requests of the batch for each of the tenant's

    def of_seconds(self, seconds: float) -> float:
        """The price of some seconds, in tokens."""
        return self.rate * seconds

    def best_net_gain(self, gains: Iterable[float]) -> tuple[float, int]:
        """The largest difference of the gain of 0, 1, ... nodes and their price, and its number of nodes."""
        net_gains = [*map(sub, gains, self.node_prices)]
        best = max(net_gains)
        return best, net_gains.index(best)


@dataclass(slots=True, eq=False)
class TenantShare:
    """One tenant's share of a step.

    A tenant is priced as if all requests of the batch were like its own. So its drafts depend on how many
    requests others have, and not on their texts. With one tenant this is the batch as it is.
    """

    requests: int = 0  # of the tenant, in the step
    scale: float = 1.0  # requests of the batch for each of them
    seconds: float = 0.0  # that the step is expected to take; 0: not known
    rate: float = 0.0  # running mean of tokens per second of such a batch; 0: not known
    prices: Prices | None = None  # those of the last decision
    priced: tuple[int, ...] | None = None  # the situation that they are for


class CostModel:
    """Times the parts of each step, and sets the prices.

    Args:
        num_drafters: drafters of the controller.
        times: returns the times of the target's passes. They are measured at the first call.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, num_drafters: int, times: Callable[[], PassTimes], clock: Callable[[], float]):
        self._load_times, self._clock = times, clock
        self._times: PassTimes | None = None
        self.drafting = [RunningCost() for _ in range(num_drafters)]  # of a draft
        self._level_shares = [LevelShare() for _ in range(num_drafters)]
        self.deciding = RunningCost()  # of the controller itself, for each drafter that it asks
        self.polling = RunningCost()
        self.batch = 0  # requests in the step
        self._served: Mapping[Request, TenantShare] = {}  # the requests of the last step
        self.rows = 0  # of the step's pass
        self._proposing = [0.0] * num_drafters  # seconds of `propose` in this step, for each drafter
        self._asked = 0  # drafters, in this step
        self._outside = 0.0  # seconds of polling, catching up and proposing in this step
        self._begin = self._end = 0.0  # of this step's decision
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
        _ = self.times  # the first measurement must not count as deciding
        self._begin, self._outside, self._asked = self._clock(), 0.0, 0
        if self._begin - self._followed >= FOLLOW_INTERVAL:
            self._followed = self._begin

    def set_batch(self, requests: Mapping[Request, TenantShare]) -> bool:
        """Note the requests of this step. Returns whether their number has changed.

        Rates begin anew then. That of a tenant does so too if all its requests are new: their texts may be
        harder to guess.
        """
        changed = len(requests) != self.batch
        stay = {share for request, share in requests.items() if request in self._served}
        self.batch, self._served, self.rows = len(requests), requests, 0
        for request in requests:
            self.rows += request.num_pending
        for share, count in Counter(requests.values()).items():
            if changed or share not in stay:
                share.rate = 0.0
            share.requests, share.scale = count, self.batch / count
            share.seconds = 0.0 if share.prices is None else share.prices.pass_seconds[0]
        return changed

    def set_prices(self, step: int, share: TenantShare, active: Sequence[Request]) -> Prices:
        """A tenant's prices of this step. They stay the same object while the situation is about the same."""
        n, tokens, nodes = len(active), 0, 0
        for request in active:
            tokens += len(request.tokens)
            nodes = max(nodes, request.max_nodes - 1)
        context = tokens / n
        about = int(context / PRICE_CONTEXT)
        situation = (self.rows, self.batch, share.requests, n, nodes, about, step // PRICE_STEPS)
        if share.prices is None or share.priced != situation:
            all_active = round(n * share.scale)
            seconds = self.times.span(self.rows, nodes * all_active, context)
            rate = max(self.batch / float(seconds[0]), share.rate)
            node_prices = (seconds[::all_active] - seconds[0]) * (rate / all_active)
            of_own = np.rint(np.linspace(0, nodes * all_active, nodes * n + 1)).astype(np.int64)
            share.priced = situation
            share.prices = Prices(rate, seconds[of_own].tolist(), node_prices.tolist(), share.scale)
        return share.prices

    def asking(self, drafter: int, requests: float) -> float:
        """Seconds to ask a drafter for `requests`, and to decide what to do with its drafts."""
        count = round(requests)
        return self.drafting[drafter](count) + self.deciding(count)

    def asking_price(self, drafter: int, requests: int, prices: Prices) -> float:
        """A tenant's tokens if a drafter is asked for so many of its requests, and as many of others."""
        return prices.of_seconds(self.asking(drafter, requests * prices.scale)) / prices.scale

    def price_per_request(self, drafter: int, prices: Prices) -> float:
        """Tokens per request if a drafter is asked for the whole batch."""
        return prices.of_seconds(self.asking(drafter, self.batch)) / self.batch

    def record_polling(self, requests: int, seconds: float) -> None:
        """Count the seconds of polling some requests."""
        self.polling.record(requests, seconds)
        self.leave_out(seconds)

    def leave_out(self, seconds: float) -> None:
        """Note seconds that are no part of this step's decision."""
        self._outside += seconds

    def record_proposing(self, drafter: int, proposing: float, total: float) -> None:
        """Note a drafter's seconds in this step: to propose, and in total with catching up before."""
        self._proposing[drafter] = proposing
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
        all_asked = round(requests * prices.scale)
        seconds = self.drafting[drafter](all_asked)
        if not seconds:
            return START_LEVEL_PRICE
        return prices.of_seconds(seconds * self._level_shares[drafter]()) / all_asked

    def follow_pass(self, observations: Sequence[Observation], experts: float | None) -> None:
        """Compare the time of this step's pass with `times`, if it is this step's turn.

        `experts` is how many experts a layer ran on average; None: no layer has experts.
        """
        if self._followed != self._begin:
            return
        now = self._clock()
        if any(seen.verdict is None for seen in observations):
            return  # rows of prompt chunks are not in `rows`
        context = sum(len(seen.request.tokens) for seen in observations) / len(observations)
        self.times.follow(self.rows, context, max(now - self._end, 1e-9), experts)

    def end_step(self, observations: Sequence[Observation]) -> None:
        """Count each tenant's tokens per second of this step.

        The seconds are the expected ones: the measured ones depend on how much others draft.
        """
        tokens = Counter[TenantShare]()
        for seen in observations:
            if seen.verdict is not None and seen.request in self._served:
                tokens[self._served[seen.request]] += len(seen.verdict.tokens)
        for share, count in tokens.items():
            if share.seconds:
                rate = count * share.scale / share.seconds
                share.rate = share.rate + MEAN_WEIGHT * (rate - share.rate) if share.rate else rate
