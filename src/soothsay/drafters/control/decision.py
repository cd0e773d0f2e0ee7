"""Section 4 of docs/controller.md: which requests' drafters are polled for their signals, which drafters are
asked for which requests, and which nodes of their drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, SignalingDrafter
from soothsay.drafters.control.cost import CostModel, Prices
from soothsay.drafters.control.forecast import (
    PROBE_SHARE,
    SHARED_MEAN_WEIGHT,
    Forecast,
    Outlook,
    ProbeSchedule,
)
from soothsay.drafters.control.request_state import Backlog, RatedDraft, RequestState

START_POLL_GAIN = 0.25
"""Initial estimate of the tokens gained by polling a paused request. High, so that polling starts enabled."""


class SignalPolling:
    """Reads the drafters' signals, and ends a request's pause where a new signal promises a gain.

    Args:
        parts: the controller's drafters.
        costs: of the controller; knows what polling costs.
        clock: returns seconds since an arbitrary moment.
        new_forecast: makes the forecast of a request for a drafter and a signal.
    """

    def __init__(
        self,
        parts: Sequence[Drafter],
        costs: CostModel,
        clock: Callable[[], float],
        new_forecast: Callable[[Request, int, int], Forecast],
    ):
        self._parts = [part if isinstance(part, SignalingDrafter) else None for part in parts]
        self._any_signals = any(part is not None for part in self._parts)
        self._costs, self._clock, self._new_forecast = costs, clock, new_forecast
        self._gain = START_POLL_GAIN  # running mean of the tokens gained by polling a paused request

    def _signals(self, request: Request) -> list[int]:
        """The signal of each drafter; 0 for one that does not signal."""
        return [0 if part is None else part.signal(request) for part in self._parts]

    def poll(self, step: int, states: Sequence[RequestState]) -> None:
        """Poll active requests always, and paused ones when polling is cheap or has paid off recently."""
        if not states or not self._any_signals:
            return
        for state in states:
            if not state.was_polled:
                self._first_poll(step, state)
        polled = [state for state in states if state.paused_until <= step]
        if len(polled) < len(states):
            price = self._costs.polling(len(states)) * self._costs.rate / self._costs.batch
            interval = 1 if self._gain > price else 1 + int(price / PROBE_SHARE)
            polled = polled if step % interval else [*states]
        if not polled:
            return
        begin = self._clock()
        for state in polled:
            was_paused = not state.is_active(step)
            signals = self._signals(state.request)
            gain = self._switch(step, state, signals) if signals != state.signals else 0.0
            if was_paused:
                self._gain += SHARED_MEAN_WEIGHT * (gain - self._gain)
        self._costs.record_polling(len(polled), self._clock() - begin)

    def _first_poll(self, step: int, state: RequestState) -> None:
        """Read a request's first signals. Its drafters read the prompt for them, which a poll does not cost.

        They are read after the prompt's pass: the first token does not wait for them.
        """
        begin = self._clock()
        state.switch_signals(self._signals(state.request), self._new_forecast)
        state.was_polled, state.paused_until = True, step
        self._costs.leave_out(self._clock() - begin)

    def _switch(self, step: int, state: RequestState, signals: list[int]) -> float:
        """Use the forecasts for new signals, and end the pause if a drafter is expected to pay.

        Returns the expected tokens beyond the drafter's price if the request was paused; else 0.
        """
        was_active = state.is_active(step)
        state.switch_signals(signals, self._new_forecast)
        prices = self._costs.prices
        if prices is None or (was_active and state.is_active(step)):
            return 0.0
        surplus = max(
            forecast.outlook(prices).net - self._costs.price_per_request(drafter, prices)
            for drafter, forecast in enumerate(state.forecasts)
        )
        if surplus <= 0:
            return 0.0
        state.paused_until = step
        return surplus


CATCH_UP_STEPS = 64
"""Steps within which reading a backlog must have paid."""

TRIAL_GAIN = 0.03
"""Tokens beyond its price that a drafter is taken to gain until its first draft. So it is tried once."""


@dataclass(slots=True)
class AskingRound:
    """The requests and the prices of one step."""

    step: int
    active: Sequence[RequestState]
    prices: Prices
    asking: list[float]  # for each drafter, tokens if it is asked for all active requests
    order: list[int]  # the drafters that are not retired from every active request, the cheapest first


class AskingPolicy:
    """Weighs what a drafter's drafts are expected to add against what asking costs.

    Args:
        parts: the controller's drafters.
        costs: of the controller.
        backlogs: of each drafter.
    """

    def __init__(self, parts: Sequence[Drafter], costs: CostModel, backlogs: Sequence[Backlog]):
        self._costs = costs
        self._backlogs = [own if own.can_grow else None for own in backlogs]
        self._keeps_features = [bool(part.taps) for part in parts]

    def begin_round(self, step: int, active: Sequence[RequestState], prices: Prices) -> AskingRound:
        """Price the drafters for the active requests of a step."""
        drafters = range(len(self._backlogs))
        asking = [prices.of_seconds(self._costs.asking(drafter, len(active))) for drafter in drafters]
        order = [i for i in drafters if not all(state.forecasts[i].probes.retired for state in active)]
        return AskingRound(step, active, prices, asking, sorted(order, key=asking.__getitem__))

    def alternatives(self, this: AskingRound, place: int, held: Sequence[Outlook]) -> list[Outlook]:
        """For each request, the best it can have without the next drafter.

        Args:
            this: the round.
            place: of the next drafter in the order.
            held: the best draft that each request has already.
        """
        best = [*held]
        for later in this.order[place + 1 :]:
            price = this.asking[later] / len(best)
            for index, state in enumerate(this.active):
                own = state.forecasts[later].outlook(this.prices)
                best[index] = best[index].or_better(own._replace(net=own.net - price))
        return best

    def requests_to_ask(self, this: AskingRound, drafter: int, alternatives: Sequence[Outlook]) -> list[int]:
        """Indices of the active requests that a drafter is asked for: probes first, then by surplus."""
        step, prices, backlog = this.step, this.prices, self._backlogs[drafter]
        price = this.asking[drafter] / len(this.active)
        probes: list[int] = []
        surpluses: list[tuple[float, int, float]] = []
        for index, (state, alternative) in enumerate(zip(this.active, alternatives, strict=True)):
            forecast = state.forecasts[drafter]
            catch_up = 0.0
            if backlog is not None:
                catch_up = prices.of_seconds(backlog.catch_up_seconds(state.request))
            expected = forecast.added_to(alternative, forecast.outlook(prices), prices)
            loss = max(price - expected, 0.0)
            forecast.probes.stretch(step, loss + catch_up)
            if forecast.probes.is_due(step):
                probes.append(index)
                continue
            surplus = expected
            if not forecast.shared.drafts and forecast.probes.pays:
                surplus = max(expected, price + TRIAL_GAIN)
            if catch_up:
                surplus -= catch_up / _steps_left(state, expected)
            if surplus > 0:
                surpluses.append((surplus, index, loss))
            else:
                forecast.probes.pause(step, loss)
        surpluses.sort(reverse=True)
        count = self._best_count(drafter, [own for own, *_ in surpluses], len(probes), prices)
        for _, index, loss in surpluses[count:]:
            this.active[index].forecasts[drafter].probes.pause(step, loss)
        return probes + [index for _, index, _ in surpluses[:count]]

    def _best_count(self, drafter: int, surpluses: Sequence[float], probes: int, prices: Prices) -> int:
        """How many requests, by falling surplus, gain the most beyond the price of asking for all of them."""
        best = -prices.of_seconds(self._costs.asking(drafter, probes)) if probes else 0.0
        best_count, total = 0, 0.0
        for count, surplus in enumerate(surpluses, start=1):
            total += surplus
            net = total - prices.of_seconds(self._costs.asking(drafter, probes + count))
            if net > best:
                best, best_count = net, count
        return best_count

    def retire_drafters(self, step: int, state: RequestState, prices: Prices, unread: int = 0) -> None:
        """Retire the drafters that will not be asked again before a request ends, and drop their backlogs.

        Args:
            step: the current step.
            state: of the request.
            prices: of this step.
            unread: tokens that will join the backlogs before a drafter can be asked.
        """
        for drafter, (backlog, forecast) in enumerate(zip(self._backlogs, state.forecasts, strict=True)):
            if backlog is None or not self._keeps_features[drafter] or forecast.probes.retired:
                continue
            left = state.tokens_left
            price = self._costs.price_per_request(drafter, prices)
            seconds = backlog.catch_up_seconds(state.request) + backlog.reading_seconds(unread)
            catch_up = prices.of_seconds(seconds)
            gain = forecast.outlook(prices).net
            forecast.probes.stretch(step, max(price - gain, 0.0) + catch_up)
            gain -= catch_up / _steps_left(state, gain)
            if forecast.probes.next_step > step + left and gain < price:
                forecast.probes.retire()
                backlog.drop(state.request)


LONG_INTERVAL, FEW_PROBES = 64, 8
"""Steps between two probes from which on a drafter is far from paying, and probes that may still come in a
request for which it is given up then. A longer request keeps its features: its text may change."""

FIRST_REST, LONGEST_REST = 256, 4096
"""Steps without features, at first and at most. The number doubles each time."""

REST_CHECKS = 16
"""Steps between two questions whether features are needed."""


@dataclass(slots=True)
class FeatureRest:
    """Steps in which the target's features are not recorded, because no request profits from them.

    Recording them and keeping the backlogs takes 1 to 2% of the time of a small model's steps.
    """

    end: int = 0  # the step in which the rest ends
    batch: int = 0  # requests when it began
    steps: int = FIRST_REST  # of the next rest

    def begin(self, step: int, batch: int) -> None:
        """Begin a rest. The next one is longer."""
        self.end, self.batch = step + self.steps, batch
        self.steps = min(2 * self.steps, LONGEST_REST)

    def is_over(self, step: int, batch: int) -> bool:
        """Whether it is time to try again. In a much smaller batch, drafts may pay that did not."""
        return step >= self.end or 2 * batch <= self.batch


IDLE_SHARE = 0.005
"""Share of the time that being awake may lose."""

AWAKE_STEPS, FIRST_AWAKE_STEPS, LONGEST_NAP = 8, 16, 64
"""Steps awake between two naps, and before the first one; steps of a nap at most."""

EARNED_WEIGHT = 1 / 64
"""Weight of the newest step in what being awake earns, at least."""


@dataclass(slots=True)
class Nap:
    """Steps in which nobody is polled or asked, because being awake has earned less than it costs.

    Decisions, polls and probes take a share of each step, for every request. Naps are as long as it takes to
    lose no more than `IDLE_SHARE`. They end where `CostModel.serves` does not hold.
    """

    end: int = 0  # the step in which the nap ends
    earned: float = 0.0  # running mean of what a step awake earns, in passes of plain decoding
    steps: int = 0  # awake
    left: int = FIRST_AWAKE_STEPS  # steps awake before the next nap

    def record(self, step: int, earned: float) -> None:
        """Count a step awake, and begin a nap after it if it is time."""
        self.steps, self.left = self.steps + 1, self.left - 1
        self.earned += max(1 / self.steps, EARNED_WEIGHT) * (earned - self.earned)
        if self.left <= 0:
            nap = AWAKE_STEPS * (-self.earned / IDLE_SHARE - 1)
            self.end, self.left = step + 1 + int(min(max(nap, 0.0), LONGEST_NAP)), AWAKE_STEPS


def is_hopeless(probes: ProbeSchedule, tokens_left: int) -> bool:
    """Whether a drafter is far from paying for a request with so many tokens until its limit."""
    return probes.interval >= max(LONG_INTERVAL, tokens_left / FEW_PROBES)


def _steps_left(state: RequestState, gain: float) -> float:
    """Steps until a request's limit, if each gains so many tokens; `CATCH_UP_STEPS` at most."""
    return max(min(state.tokens_left / (1 + max(gain, 0.0)), CATCH_UP_STEPS), 1.0)


def select_nodes(
    drafts: Mapping[Request, Sequence[RatedDraft]], prices: Prices, drafting: float, batch: int
) -> dict[Request, DraftTree]:
    """Select the nodes that give the most tokens per second: those with the highest probabilities.

    Args:
        drafts: of each request that has any.
        prices: have the time of a pass by its number of nodes.
        drafting: seconds that drafting has taken in this step.
        batch: requests of the step. Each gets one token without any draft.

    Returns:
        A tree for each request that has a node to verify. A tree with `draws` is kept whole: cutting it by
        the tokens that were drawn would bias its verifier.
    """
    selected: dict[Request, DraftTree] = {}
    merged: list[tuple[Request, DraftTree]] = []
    nodes: list[tuple[float, int, int]] = []  # minus the probability, index in `merged`, node
    for request, own in drafts.items():
        max_depth = request.max_depth
        drawn = next((draft.tree for draft in own if draft.tree.draws), None)
        if drawn is not None:
            selected[request] = drawn
            continue
        tree, probabilities = _merge_drafts(own)
        index, depths = len(merged), tree.depths
        best = [(-p, index, node) for node, p in enumerate(probabilities) if 0 < depths[node] <= max_depth]
        best.sort()
        nodes += best[: request.max_nodes - 1]
        merged.append((request, tree))
    if len(merged) > 1:
        nodes.sort()
    kept: dict[int, list[int]] = {}
    for _, index, node in nodes[: _best_count(nodes, prices, drafting, batch)]:
        kept.setdefault(index, []).append(node)
    for index, own_nodes in kept.items():
        request, tree = merged[index]
        selected[request] = tree if len(own_nodes) == len(tree) - 1 else tree.subtree(own_nodes)
    return selected


def _best_count(nodes: Sequence[tuple[float, int, int]], prices: Prices, drafting: float, batch: int) -> int:
    """How many of the nodes, the best first, give the most tokens per second."""
    tokens = float(batch)
    best, best_rate = 0, tokens / (drafting + prices.pass_seconds[0])
    for count, (minus_probability, *_) in enumerate(nodes, start=1):
        tokens -= minus_probability
        rate = tokens / (drafting + prices.pass_seconds[count])
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def _merge_drafts(drafts: Sequence[RatedDraft]) -> RatedDraft:
    """One tree with the nodes of all drafts. A node of several drafts has its highest probability."""
    if len(drafts) == 1:
        return drafts[0]
    merged, known = DraftTree(drafts[0].tree.tokens[0]), [1.0]
    for tree, probabilities in drafts:
        for node, probability in zip(merged.include(tree), probabilities, strict=True):
            if node == len(known):
                known.append(probability)
            else:
                known[node] = max(known[node], probability)
    return RatedDraft(merged, known)
