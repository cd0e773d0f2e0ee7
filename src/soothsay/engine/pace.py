"""How many rows a step may have while requests decode, learnt from the time that steps take."""

from __future__ import annotations

MIN_PREFILL_ROWS = 32
"""Rows of prefill that every step may have. With fewer, reading the weights would not be worth it."""

SMOOTHING = 0.3
"""Weight of the newest step in the running mean, 0 to 1."""


class Pace:
    """The number of rows that fit into a given time.

    A prefill chunk makes all decoding requests wait. Most engines bound it by a number of rows, which takes
    milliseconds on one machine and seconds on another. Here the bound is a time: Sarathi-Serve's bound on
    stalls (Agrawal et al. 2024, arXiv 2403.02310), with the cost of a row measured as steps run.

    Args:
        seconds: that a step may take; None: any time.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._per_row: float | None = None

    def rows(self, most: int, requests: int) -> int:
        """Rows that fit into the time, at most `most`; at least one a request and `MIN_PREFILL_ROWS`."""
        if self._seconds is None or self._per_row is None:
            return most
        return min(most, max(requests + MIN_PREFILL_ROWS, int(self._seconds / self._per_row)))

    def follow(self, rows: int, seconds: float) -> None:
        """Learn from a step. Small steps are ignored: loading the weights dominates them, so they say nothing
        about the cost of a row.

        A slow step counts for no more than twice the mean: another process may have had the processor.
        """
        if rows < MIN_PREFILL_ROWS:
            return
        per_row = seconds / rows
        if self._per_row is None:
            self._per_row = per_row
        else:
            self._per_row += SMOOTHING * (min(per_row, 2 * self._per_row) - self._per_row)
