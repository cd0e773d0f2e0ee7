"""Section 4.2 of docs/controller.md: which drafters are asked, and for which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soothsay.drafters.base import Drafter
from soothsay.drafters.control.backlog import Backlog
from soothsay.drafters.control.constants import CATCH_UP_STEPS, TRIAL_GAIN
from soothsay.drafters.control.cost import CostModel, Prices
from soothsay.drafters.control.forecast import Outlook
from soothsay.drafters.control.request_state import RequestState


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
        asking, order = list[float](), list[int]()
        for drafter in range(len(self._backlogs)):
            asking.append(prices.of_seconds(self._costs.asking(drafter, len(active))))
            for state in active:
                if not state.forecasts[drafter].probes.retired:
                    order.append(drafter)
                    break
        order.sort(key=asking.__getitem__)
        return AskingRound(step, active, prices, asking, order)

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
                best[index] = best[index].or_better(state.forecasts[later].outlook(this.prices).minus(price))
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
                forecast.retire()
                backlog.drop(state.request)


def _steps_left(state: RequestState, gain: float) -> float:
    """Steps until a request's limit, if each gains so many tokens; `CATCH_UP_STEPS` at most."""
    return max(min(state.tokens_left / (1 + max(gain, 0.0)), CATCH_UP_STEPS), 1.0)
