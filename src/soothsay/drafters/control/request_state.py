"""Section 3 of docs/controller.md: what the controller knows of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.control.acceptance import right_nodes
from soothsay.drafters.control.cost import Prices
from soothsay.drafters.control.forecast import Forecast, Outlook, gains_of


class FirstGuess(NamedTuple):
    """What a draft says about the first token."""

    drafter: int
    best: float  # probability that its best node is right
    tree: DraftTree


class RatedDraft(NamedTuple):
    """A draft, and the probability that each of its nodes is right. The root's is 1."""

    tree: DraftTree
    probabilities: list[float]


class UncheckedDraft(NamedTuple):
    """A draft that is not yet known to be right or wrong at every node."""

    forecast: Forecast  # of the drafter that proposed it
    length: int  # committed tokens when it was proposed
    tree: DraftTree
    expected: float  # nodes expected to be right
    step: list[FirstGuess]  # of all drafts of this step


@dataclass(slots=True)
class RequestState:
    """Forecasts, open drafts and the pause of one request."""

    request: Request
    signals: list[int]  # the last signal of each drafter; 0 until they are polled
    forecasts: list[Forecast]  # of each drafter, for its signal
    other_forecasts: dict[tuple[int, int], Forecast] = field(default_factory=dict)
    """Forecasts for signals that a drafter had before, by drafter and signal."""
    open_drafts: list[UncheckedDraft] = field(default_factory=list)
    was_polled: bool = False  # whether the drafters' signals have been read
    paused_until: int = 0  # no drafter is asked before this step, unless the batch size changes

    def is_active(self, step: int) -> bool:
        """Whether drafters may be asked in this step."""
        return self.paused_until <= step

    def pause_until_next_probe(self) -> None:
        """Pause until a drafter is to be probed. The request stays active if that is the next step."""
        self.paused_until = min([forecast.probes.next_step for forecast in self.forecasts])

    @property
    def tokens_left(self) -> int:
        """Tokens until the request's limit."""
        return self.request.limit - len(self.request.tokens)

    def switch_signals(
        self, signals: list[int], new_forecast: Callable[[Request, int, int], Forecast]
    ) -> None:
        """Use the forecasts for other signals from now on.

        Args:
            signals: of each drafter.
            new_forecast: makes the forecast of a request for a drafter and a signal.
        """
        for drafter, (before, now) in enumerate(zip(self.signals, signals, strict=True)):
            if before != now and not self.forecasts[drafter].probes.retired:
                self.other_forecasts[drafter, before] = self.forecasts[drafter]
                known = self.other_forecasts.get((drafter, now))
                self.forecasts[drafter] = known or new_forecast(self.request, drafter, now)
        self.signals = signals
        self.pause_until_next_probe()

    def rate_draft(self, drafter: int, tree: DraftTree, prices: Prices) -> tuple[RatedDraft, Outlook]:
        """Record a draft. Returns it with the probability of each node, and its outlook."""
        forecast, length = self.forecasts[drafter], len(self.request.tokens)
        probabilities = forecast.shared.calibration.probabilities(tree)[1:]
        best = sorted(probabilities, reverse=True)
        forecast.record(gains_of(best, len(forecast.gains)))
        last = self.open_drafts[-1] if self.open_drafts else None
        step = last.step if last is not None and last.length == length else []
        self.open_drafts.append(UncheckedDraft(forecast, length, tree, sum(best), step))
        ratio = forecast.reliability.ratio
        rated = [min(p * ratio, 1.0) for p in probabilities]
        best = sorted(rated, reverse=True)
        outlook = forecast.outlook_of([*accumulate(best, initial=0.0)], prices)
        step.append(FirstGuess(drafter, outlook.best, tree))
        return RatedDraft(tree, [1.0, *rated]), outlook

    def check_drafts(self) -> None:
        """Compare open drafts with the tokens that have come since."""
        drafts, self.open_drafts = self.open_drafts, []
        for draft in drafts:
            forecast, length, tree, expected, step = draft
            tokens = self.request.tokens[length:].tolist()
            right = right_nodes(tree, tokens)
            if right is None:
                self.open_drafts.append(draft)
                continue
            forecast.shared.calibration.record(tree, right)
            forecast.record_accepted(expected, len(right))
            if right and len(step) > 1:
                for drafter, best, other in step:
                    if other is not tree:
                        is_alone = tokens[0] not in other.children[0]
                        forecast.shared.record_apart(drafter, best, len(right), is_alone)
