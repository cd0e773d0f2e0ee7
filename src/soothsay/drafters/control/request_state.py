"""What the controller knows of requests: sections 2 and 3 of docs/controller.md.

A `Backlog` keeps what a drafter did not read while it paused, and knows what reading costs. A `RequestState`
has the forecasts of one request, and its drafts that are not yet known to be right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, ReadingDrafter
from soothsay.drafters.control.acceptance import right_nodes
from soothsay.drafters.control.cost import COST_WEIGHT, Prices
from soothsay.drafters.control.forecast import Forecast, Outlook, gains_of
from soothsay.drafters.trees.own_kv import READ, committed

MAX_BACKLOG = 2048
"""Tokens of a request whose features are kept until its drafter is asked. If there are more, it reads them at
once. In a model of 1B parameters they take a third of the memory of keys and values."""

CROWDED_ROWS = 4
"""Rows per request above which a pass has prompts in it. Its features are then copied: a view of a few rows
would keep the features of the whole pass in memory."""

READ_APART = 16
"""Tokens from which on a drafter that reads tokens does so before its draft, in a pass of its own. Fewer cost
little in the pass of the draft."""


@dataclass(slots=True)
class _UnreadFeatures:
    """Features of one request, in pieces that follow each other."""

    start: int  # position of the first token
    pieces: list[tuple[Tensor, ...]] = field(default_factory=list)  # for each tap: [tokens, hidden]
    tokens: int = 0


class Backlog:
    """Keeps features for a drafter that is not asked at every step, and shows them in one piece.

    A `ReadingDrafter` without taps reads tokens, of which nothing has to be kept.

    Args:
        drafter: the drafter that may pause.
        layers: where its taps are among the taps of an observation.
        clock: returns seconds since an arbitrary moment.
        target_seconds: returns the seconds in which the target reads a token of a prompt. A drafter that
            reads tokens is taken for as slow until its own time is measured.
    """

    def __init__(
        self, drafter: Drafter, layers: slice, clock: Callable[[], float], target_seconds: Callable[[], float]
    ):
        self._target_seconds = target_seconds
        self._drafter, self._layers, self._clock = drafter, layers, clock
        self._reader = drafter if isinstance(drafter, ReadingDrafter) and not drafter.taps else None
        self._unread: dict[Request, _UnreadFeatures] = {}
        self._token_seconds = 0.0  # running mean; 0: not measured yet

    @property
    def can_grow(self) -> bool:
        """Whether the drafter reads anything that it could miss."""
        return self._reader is not None or bool(self._drafter.taps)

    def catch_up_seconds(self, request: Request) -> float:
        """Estimated seconds to read a request's backlog; 0 for features if nothing was measured yet."""
        if self._reader is not None:
            tokens = self._reader.unread(request)
            if tokens < READ_APART:
                return 0.0
            return (self._token_seconds or self._target_seconds()) * tokens
        unread = self._unread.get(request)
        return 0.0 if unread is None else self.reading_seconds(unread.tokens)

    def reading_seconds(self, tokens: int) -> float:
        """Estimated seconds to read the features of some tokens."""
        return self._token_seconds * tokens

    def add(self, observations: Sequence[Observation]) -> None:
        """Keep the features of a step in which the drafter was not asked.

        A request whose backlog reaches `MAX_BACKLOG` tokens is read now.
        """
        crowded = sum(len(seen.taps[0]) for seen in observations) > CROWDED_ROWS * len(observations)
        full: list[Request] = []
        for seen, views in zip(observations, committed(observations, self._layers), strict=True):
            taps = tuple(tap.clone() for tap in views) if crowded else tuple(views)
            unread = self._unread.get(seen.request)
            if unread is None:
                unread = self._unread[seen.request] = _UnreadFeatures(seen.start)
            unread.pieces.append(taps)
            unread.tokens += len(taps[0])
            if unread.tokens >= MAX_BACKLOG:
                full.append(seen.request)
        self.catch_up(full)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let the drafter read the backlogs of these requests."""
        if self._reader is not None:
            self._let_read(self._reader, requests)
            return
        unread = [(request, self._unread.pop(request)) for request in requests if request in self._unread]
        if not unread:
            return
        begin = self._clock()
        self._drafter.observe([_as_prompt_chunk(request, own) for request, own in unread])
        if tokens := sum(own.tokens for _, own in unread if own.tokens >= READ):
            self._record(self._clock() - begin, tokens)

    def _let_read(self, drafter: ReadingDrafter, requests: Sequence[Request]) -> None:
        counts = {request: drafter.unread(request) for request in requests}
        behind = [request for request, count in counts.items() if count >= READ_APART]
        if behind:
            begin = self._clock()
            drafter.catch_up(behind)
            self._record(self._clock() - begin, sum(counts[request] for request in behind))

    def _record(self, seconds: float, tokens: int) -> None:
        """Count the time of reading some tokens."""
        weight = COST_WEIGHT if self._token_seconds else 1.0
        self._token_seconds += weight * (seconds / tokens - self._token_seconds)

    def drop(self, request: Request) -> None:
        """Forget the features of a request."""
        self._unread.pop(request, None)


def _as_prompt_chunk(request: Request, unread: _UnreadFeatures) -> Observation:
    """One observation of all unread features of a request. It looks like a chunk of a prompt."""
    layers = zip(*unread.pieces, strict=True)
    return Observation(request, unread.start, unread.tokens, tuple(torch.cat(layer) for layer in layers))


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
        return self.request.limit - self.request.length

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
        forecast, length = self.forecasts[drafter], self.request.length
        probabilities = forecast.shared.calibration.probabilities(tree)[1:]
        best = sorted(probabilities, reverse=True)
        forecast.record(gains_of(best))
        last = self.open_drafts[-1] if self.open_drafts else None
        step = last.step if last is not None and last.length == length else []
        self.open_drafts.append(UncheckedDraft(forecast, length, tree, sum(best), step))
        ratio = forecast.reliability.ratio
        rated = [1.0 if (p := known * ratio) > 1.0 else p for known in probabilities]
        best = [1.0 if (p := known * ratio) > 1.0 else p for known in best]
        outlook = forecast.outlook_of(gains_of(best), prices)
        step.append(FirstGuess(drafter, outlook.best, tree))
        return RatedDraft(tree, [1.0, *rated]), outlook

    def check_drafts(self) -> None:
        """Compare open drafts with the tokens that have come since."""
        drafts, self.open_drafts = self.open_drafts, []
        for draft in drafts:
            forecast, length, tree, expected, step = draft
            tokens: list[int] = self.request.tokens[length:].tolist()
            right = right_nodes(tree, tokens)
            if right is None:
                self.open_drafts.append(draft)
                continue
            forecast.shared.calibration.record(tree, right)
            forecast.record_accepted(expected, len(right))
            if right and len(step) > 1:
                for drafter, best, other in step:
                    if other is not tree:
                        is_alone = len(other.walk(tokens[:1])) == 1
                        forecast.shared.record_apart(drafter, best, len(right), is_alone)
