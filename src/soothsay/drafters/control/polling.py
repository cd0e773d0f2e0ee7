"""Section 4.1 of docs/controller.md: which requests' drafters are polled for their signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soothsay.core.request import Request
from soothsay.drafters.base import Drafter, SignalingDrafter
from soothsay.drafters.control.constants import PROBE_SHARE, SHARED_MEAN_WEIGHT, START_POLL_GAIN
from soothsay.drafters.control.cost import CostModel
from soothsay.drafters.control.forecast import Forecast
from soothsay.drafters.control.request_state import RequestState


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
