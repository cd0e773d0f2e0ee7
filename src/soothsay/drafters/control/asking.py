"""Section 4.2 of docs/controller.md: which drafters are asked, and for which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soothsay.drafters.base import Drafter
from soothsay.drafters.control.backlog import Backlog
from soothsay.drafters.control.constants import CATCH_UP_STEPS, TRIAL_GAIN
from soothsay.drafters.control.cost import CostModel, Prices
from soothsay.drafters.control.forecast import NOTHING, Outlook
from soothsay.drafters.control.request_state import RequestState
from soothsay.drafters.control.selection import RatedDraft


@dataclass(slots=True)
class AskingRound:
    """One tenant's requests in a step, their prices, and the drafts that they have so far."""

    step: int
    active: Sequence[RequestState]
    prices: Prices
    asking: list[float]  # for each drafter, tokens if it is asked for all active requests
    held: list[Outlook]  # the best draft of each request
    drafts: list[list[RatedDraft]]  # all drafts of each request
    seconds: float = 0.0  # of drafting, if the whole batch drafted as these requests do


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

    def begin_round(self, step: int, active: Sequence[RequestState]) -> AskingRound:
        """Price nodes and drafters for the active requests of one tenant."""
        prices = self._costs.set_prices(step, active[0].share, [state.request for state in active])
        drafters = range(len(self._backlogs))
        asking = [self._costs.asking_price(drafter, len(active), prices) for drafter in drafters]
        return AskingRound(step, active, prices, asking, [NOTHING] * len(active), [[] for _ in active])

    def order(self, active: Sequence[RequestState]) -> list[int]:
        """The drafters that are not retired from every active request, the cheapest first."""
        drafters = range(len(self._backlogs))
        open_ = [d for d in drafters if not all(state.forecasts[d].probes.retired for state in active)]
        return sorted(open_, key=lambda drafter: self._costs.asking(drafter, self._costs.batch))

    def alternatives(self, this: AskingRound, later: Sequence[int]) -> list[Outlook]:
        """For each request, the best it can have without the next drafter.

        Args:
            this: the round.
            later: the drafters after the next one.
        """
        best = [*this.held]
        for drafter in later:
            price = this.asking[drafter] / len(best)
            for index, state in enumerate(this.active):
                outlook = state.forecasts[drafter].outlook(this.prices)
                best[index] = best[index].or_better(outlook.minus(price))
        return best

    def requests_to_ask(self, this: AskingRound, drafter: int, alternatives: Sequence[Outlook]) -> list[int]:
        """Indices of the active requests that a drafter is asked for: probes first, then by surplus."""
        step, prices = this.step, this.prices
        price = this.asking[drafter] / len(this.active)
        probes: list[int] = []
        surpluses: list[tuple[float, int, float]] = []
        for index, (state, alternative) in enumerate(zip(this.active, alternatives, strict=True)):
            forecast = state.forecasts[drafter]
            catch_up = self.catch_up_price(drafter, state, prices)
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

    def catch_up_price(self, drafter: int, state: RequestState, prices: Prices) -> float:
        """Tokens that it costs to let a drafter catch up with a request."""
        backlog = self._backlogs[drafter]
        return 0.0 if backlog is None else prices.of_seconds(backlog.catch_up_seconds(state.request))

    def _best_count(self, drafter: int, surpluses: Sequence[float], probes: int, prices: Prices) -> int:
        """How many requests, by falling surplus, gain the most beyond the price of asking for all of them."""
        best = -self._costs.asking_price(drafter, probes, prices) if probes else 0.0
        best_count, total = 0, 0.0
        for count, surplus in enumerate(surpluses, start=1):
            total += surplus
            net = total - self._costs.asking_price(drafter, probes + count, prices)
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
                forecast.retire()
                backlog.drop(state.request)


def _steps_left(state: RequestState, gain: float) -> float:
    """Steps until a request's limit, if each gains so many tokens; `CATCH_UP_STEPS` at most."""
    return max(min(state.tokens_left / (1 + max(gain, 0.0)), CATCH_UP_STEPS), 1.0)
