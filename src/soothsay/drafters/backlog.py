"""What a drafter has not been shown while it paused, until it is asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soothsay.drafters.base import Drafter, Observation
from soothsay.drafters.context import READ
from soothsay.engine.request import Request

KEPT = 2048
"""Tokens of a request whose features wait until its drafter is asked, so that prompts are read where that
pays; of more, it is shown these. In a model of 1B they take a third of what keys and values take."""


@dataclass(slots=True)
class _Missed:
    """What it has missed of one request, in pieces that follow each other."""

    start: int  # the first token
    pieces: list[tuple[Tensor, ...]] = field(default_factory=list)  # for each tap, [tokens, hidden]
    tokens: int = 0


class Backlog:
    """Keeps features for a drafter that is not asked at every step, and shows them in one piece.

    Args:
        drafter: who may pause.
        layers: its taps among those of an observation.
        clock: seconds since whenever.
    """

    def __init__(self, drafter: Drafter, layers: slice, clock: Callable[[], float]):
        self._drafter, self._layers, self._clock = drafter, layers, clock
        self._missed: dict[Request, _Missed] = {}
        self._token = 0.0  # seconds for one of them

    def seconds(self, request: Request) -> float:
        """What catching up with a request will take; 0 as long as that is not known."""
        missed = self._missed.get(request)
        return 0.0 if missed is None else self.reading(missed.tokens)

    def reading(self, tokens: int) -> float:
        """Seconds for a text of so many."""
        return self._token * tokens

    def keep(self, observations: Sequence[Observation]) -> None:
        """Note what the drafter would have to see to go on; where it has become much, it sees it now."""
        crowded = sum(len(seen.taps[0]) for seen in observations) > 4 * len(observations)
        full: list[Request] = []
        for seen in observations:
            count, taps = _committed(seen, self._layers)
            if crowded:  # a view would keep the rows of the whole pass
                taps = tuple(tap.clone() for tap in taps)
            missed = self._missed.get(seen.request)
            if missed is None:
                missed = self._missed[seen.request] = _Missed(seen.start)
            missed.pieces.append(taps)
            missed.tokens += count
            if missed.tokens >= KEPT:
                full.append(seen.request)
        self.show(full)

    def show(self, requests: Sequence[Request]) -> None:
        """Have the drafter catch up with these."""
        late = [(request, self._missed.pop(request)) for request in requests if request in self._missed]
        if not late:
            return
        begin = self._clock()
        self._drafter.observe([_as_prompt(request, missed) for request, missed in late])
        if tokens := sum(missed.tokens for _, missed in late if missed.tokens >= READ):
            seconds = (self._clock() - begin) / tokens
            self._token += (0.2 if self._token else 1.0) * (seconds - self._token)

    def forget(self, request: Request) -> None:
        """It will not be asked for this one again."""
        self._missed.pop(request, None)


def _committed(seen: Observation, layers: slice) -> tuple[int, tuple[Tensor, ...]]:
    """How many tokens of an observation stay, and what was seen of them."""
    path = [] if seen.verdict is None else seen.verdict.path
    count, taps = seen.num_pending + len(path), seen.taps[layers]
    if count == len(taps[0]):
        return count, taps
    if not path or path[-1] == len(path):  # a chain
        return count, tuple(tap[:count] for tap in taps)
    rows = [*range(seen.num_pending), *(seen.num_pending + node - 1 for node in path)]
    return count, tuple(tap[rows] for tap in taps)


def _as_prompt(request: Request, missed: _Missed) -> Observation:
    """All that was missed of a request, as if it had been a piece of a prompt."""
    layers = zip(*missed.pieces, strict=True)
    return Observation(request, missed.start, missed.tokens, tuple(torch.cat(layer) for layer in layers))
