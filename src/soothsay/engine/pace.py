"""How much of a prompt a step may read while others wait for their next tokens."""

from __future__ import annotations

LEAST = 32
"""Rows of prompts that a step may read in any case: with fewer, the weights are read for too little."""

RECENT = 0.3
"""Weight of the newest pass."""


class Pace:
    """How many rows fit in a given time, learnt from the passes that are run.

    Prompts are read in chunks beside the steps of those who decode, and a chunk makes all of them wait. Its
    size is a number of rows in most engines, which means a moment on one machine and seconds on another; here
    it is a time (Sarathi-Serve's bound on stalls, Agrawal et al. 2024, arXiv 2403.02310, held by measuring).

    Args:
        seconds: that a pass may take; None is any number.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._per_row: float | None = None

    def rows(self, most: int, requests: int) -> int:
        """Rows that fit in the time, `most` at most; but for so many requests one each and `LEAST` more."""
        if self._seconds is None or self._per_row is None:
            return most
        return min(most, max(requests + LEAST, int(self._seconds / self._per_row)))

    def follow(self, rows: int, seconds: float) -> None:
        """Learn from a pass that was run. Of a small one, most is the time of the weights: it says nothing.

        A moment that the machine has stolen counts for no more than a doubling.
        """
        if rows < LEAST:
            return
        per_row = seconds / rows
        if self._per_row is None:
            self._per_row = per_row
        else:
            self._per_row += RECENT * (min(per_row, 2 * self._per_row) - self._per_row)
