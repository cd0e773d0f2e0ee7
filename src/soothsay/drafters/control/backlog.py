"""Section 2 of docs/controller.md: what a drafter did not read while it paused, and what reading costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.drafters.base import Drafter, ReadingDrafter
from soothsay.drafters.control.cost import COST_WEIGHT
from soothsay.drafters.trees.own_kv import READ

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
        for seen in observations:
            count, taps = _committed_features(seen, self._layers)
            if crowded:
                taps = tuple(tap.clone() for tap in taps)
            unread = self._unread.get(seen.request)
            if unread is None:
                unread = self._unread[seen.request] = _UnreadFeatures(seen.start)
            unread.pieces.append(taps)
            unread.tokens += count
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


def _committed_features(seen: Observation, layers: slice) -> tuple[int, tuple[Tensor, ...]]:
    """The number of an observation's tokens that were committed, and their features."""
    path = [] if seen.verdict is None else seen.verdict.path
    count, taps = seen.num_pending + len(path), seen.taps[layers]
    if count == len(taps[0]):
        return count, taps
    if not path or path[-1] == len(path):  # the accepted nodes are 1, 2, ...
        return count, tuple(tap[:count] for tap in taps)
    rows = seen.committed_rows
    return count, tuple(tap[rows] for tap in taps)


def _as_prompt_chunk(request: Request, unread: _UnreadFeatures) -> Observation:
    """One observation of all unread features of a request. It looks like a chunk of a prompt."""
    layers = zip(*unread.pieces, strict=True)
    return Observation(request, unread.start, unread.tokens, tuple(torch.cat(layer) for layer in layers))
