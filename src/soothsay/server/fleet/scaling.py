"""How many engines a fleet should have: more when they are full, fewer when fewer can do the work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from soothsay.errors import SoothsayError

FULL = 0.8
"""Work, as a share of what the engines can have, above which one more is started."""

FREE = 0.4
"""Work, as a share of what one engine fewer could have, below which one goes. It is far below `FULL`, so an
engine that was started is not drained at once."""

GROW_AFTER = 5.0
"""Seconds without a break in which the engines must be full. A burst that ends sooner needs no engine."""

SHRINK_AFTER = 60.0
"""Seconds without a break in which an engine must be spare. Loading one takes seconds to minutes."""

MAX_REPLICAS = 1024
"""Limit of engines: a typing error should not fill a cluster."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest number of engines. Raises `SoothsayError` if they are none."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            raise SoothsayError(
                f"{self.least}:{self.most} is no range of engines: write MIN:MAX, from 1 to {MAX_REPLICAS}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "2", or "1:3" for between one and three. Raises `SoothsayError`."""
        if not (found := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text, re.ASCII)):
            raise SoothsayError(f"{text!r} is no number of engines: write 2, or 1:3 for between 1 and 3")
        return cls(int(found[1]), int(found[2] or found[1]))

    def clamp(self, size: int) -> int:
        """The number within the bounds that is nearest."""
        return min(max(size, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many engines there are, and how much they have to do.

    `work` is measured in full engines: 1.5 is what fills one engine and half of another. An engine is full
    when it has as many answers as it runs at once (`EngineConfig.max_requests`), or no free KV blocks.
    """

    size: int  # engines that are to stay
    ready: int  # of these, engines that serve
    work: float


class Scaler:
    """The rule by which a fleet grows and shrinks, by one engine at a time. It has no clock of its own.

    An engine is added when work has been above `FULL` of all engines for `GROW_AFTER` seconds. An engine goes
    when work has been below `FREE` of one engine fewer for `SHRINK_AFTER` seconds. No engine is added while
    one loads.

    Args:
        bounds: of the number of engines.

    Example:
        >>> scaler = Scaler(Bounds(1, 3))
        >>> [scaler.size(Crowd(1, 1, work=0.9), now) for now in (0, 3, 6)]
        [1, 1, 2]
    """

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.fixed: int | None = None  # the number that somebody has set by hand
        self._full_since: float | None = None
        self._spare_since: float | None = None

    def size(self, crowd: Crowd, now: float) -> int:
        """The number of engines that there should be.

        Args:
            crowd: what there is.
            now: seconds, from any starting point.
        """
        full = crowd.ready == crowd.size and crowd.work > FULL * crowd.size
        spare = crowd.work < FREE * (crowd.size - 1)
        self._full_since = (now if self._full_since is None else self._full_since) if full else None
        self._spare_since = (now if self._spare_since is None else self._spare_since) if spare else None
        if self.fixed is not None:
            return self.fixed
        size = crowd.size
        if self._full_since is not None and now - self._full_since >= GROW_AFTER:
            size, self._full_since = size + 1, None
        elif self._spare_since is not None and now - self._spare_since >= SHRINK_AFTER:
            size, self._spare_since = size - 1, None
        return self.bounds.clamp(size)
