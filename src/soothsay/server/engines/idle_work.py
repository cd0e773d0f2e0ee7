"""What an engine does while it has no requests: its drafters learn, and what they learned is saved."""

from __future__ import annotations

import time
from collections.abc import Callable

from soothsay.engine.engine import Engine
from soothsay.errors import SoothsayError
from soothsay.server.http.json_log import log

SAVE_INTERVAL = 300.0
"""Seconds of serving after which what was learned is saved, at the next moment without requests."""

BUSY_FACTOR = 4
"""An engine that is never idle saves after this many intervals. That delays its answers by some 0.1 s."""


STUDY_PAUSE = 0.05
"""Seconds between two moments of learning, in which the drafters' share of time adds up."""


class IdleWork:
    """Keeps the time of the work between requests.

    Args:
        engine: the engine, stepped by this thread only.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._engine, self._clock = engine, clock
        self._saved = clock()
        self._served = False  # since the last save
        self._studies = False  # whether drafters have more to learn

    def seconds_to_next(self) -> float | None:
        """Seconds until `run` has something to do, at least 0; None: not before the next request."""
        if self._studies:
            return STUDY_PAUSE
        if self._engine.kept is None or not self._served:
            return None
        return max(self._saved + SAVE_INTERVAL - self._clock(), 0.0)

    def run(self) -> None:
        """Do what is due. Call it while there are no requests."""
        if self._studies:
            self._studies = self._engine.study()
        due = self.seconds_to_next()
        if due is not None and due <= 0:
            self.save()

    def after_step(self) -> None:
        """Note a step, and save if that was put off for too long."""
        self._served = self._studies = True
        if self._engine.kept is not None and self._clock() - self._saved > BUSY_FACTOR * SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Save what was learned. A failure is logged, and does no harm."""
        try:
            self._engine.save_learned()
        except SoothsayError as error:
            log.error("what drafters learned was not saved", extra={"reason": str(error)})
        self._saved, self._served = self._clock(), False
