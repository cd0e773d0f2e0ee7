"""T(rows, context): the seconds that one pass of the target takes, as a curve that follows the machine.

Speculation pays because a pass of 16 rows costs little more than a pass of one row. How much more depends on
the model, the number format and the machine. So it is measured (`pass_measuring`), and remembered on disk
(`pass_times_file`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from soothsay.core.arrays import FloatArray, IntArray
from soothsay.model.expert_rows import ExpertRows

SCALE_WEIGHT = 0.15
"""Weight of a pass that was run, for the scale of all sizes. The speed of a machine changes with time."""

ROW_SCALE_WEIGHT = 0.04
"""Further weight for the sizes next to the pass that was run. It is smaller than `SCALE_WEIGHT`. Otherwise
sizes that were not run recently would keep the scale of an earlier speed of the machine."""

MAX_JUMP = 2.0
"""One pass changes a scale as if it took at most this many times the known time, or at least its inverse."""

MIN_SECONDS = 1e-9
"""The shortest time of a pass, so that nothing divides by zero."""


class PassTimes:
    """T(rows, context) of a model, in seconds. It follows the times of the passes that are run.

    Args:
        rows: numbers of rows at which T was measured, rising.
        contexts: numbers of context tokens at which T was measured, rising; one or more.
        seconds: `[context][row]`.
        experts: `[row]`, how many experts a layer of these passes ran on average; None: the model has none.
    """

    def __init__(
        self,
        rows: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[Sequence[float]],
        experts: Sequence[float] | None = None,
    ):
        self.rows, self.contexts = list(rows), list(contexts)
        self.seconds = [_without_delays(times) for times in seconds]
        self._rows, self._known = np.array(self.rows), np.array(self.seconds)
        self._scales: FloatArray | None = None  # [rows]: seconds of real passes / measured seconds
        self.experts = None if experts is None else ExpertRows(rows, experts)

    @property
    def total(self) -> float:
        """Seconds of all measured passes together."""
        return sum(map(sum, self.seconds))

    def __call__(self, rows: int, context: float = 0.0) -> float:
        """Seconds of a pass of `rows` rows, each with `context` tokens before it on average."""
        return float(self.span(rows, 0, context)[0])

    def span(self, rows: int, more: int, context: float) -> FloatArray:
        """`[more + 1]` seconds of passes of `rows`, `rows + 1`, ..., `rows + more` rows."""
        asked = self._counted(np.arange(rows, rows + more + 1, dtype=np.float64))
        seconds, longest = self._known[0], self._known[-1]
        if len(self.contexts) > 1:
            share = (context - self.contexts[0]) / (self.contexts[-1] - self.contexts[0])
            seconds = seconds + (longest - seconds) * share
        if self._scales is not None:  # they move apart, and more rows must not seem to cost less
            seconds = np.maximum.accumulate(seconds * self._scales)
        return np.maximum(_interpolate(self._rows, seconds, asked), MIN_SECONDS)

    def _counted(self, rows: FloatArray) -> FloatArray:
        """Rows as the measured passes count them, whose tokens are unrelated."""
        return rows if self.experts is None else self.experts(rows)

    def follow(self, rows: int, context: float, seconds: float, experts: float | None = None) -> None:
        """Learn from a pass that the engine ran. `seconds` includes sampling and moving the accepted KV.

        A pass that the machine delayed counts at most `MAX_JUMP` times the known time. `experts` is how many
        experts a layer ran on average.
        """
        if self.experts is not None and experts is not None:
            self.experts.follow(rows, experts)
        ratio = seconds / self(rows, context)
        if self._scales is None:
            self._scales = np.full(len(self.rows), ratio)
            return
        places = np.arange(len(self.rows))
        counted = self._counted(np.array([rows], dtype=np.float64))
        distance = np.abs(places - np.interp(counted, self.rows, places))
        weights = SCALE_WEIGHT + ROW_SCALE_WEIGHT * np.clip(1 - distance, 0, 1)
        self._scales *= 1 + weights * (min(max(ratio, 1 / MAX_JUMP), MAX_JUMP) - 1)

    @classmethod
    def agreed(cls, several: Sequence[PassTimes]) -> PassTimes:
        """Combine several measurements of the same passes, the newest last. See `of`."""
        seconds = np.stack([times._known for times in several])  # [measurement, context, rows]
        totals = seconds.sum((1, 2), keepdims=True)
        median = np.median(seconds / totals, axis=0) * totals[-1]
        newest = several[-1]
        experts = None if newest.experts is None else newest.experts.experts
        return cls(newest.rows, newest.contexts, median.tolist(), experts)


def _without_delays(times: Sequence[float]) -> list[float]:
    """The least of each time and those of more rows, which never cost less: noise makes passes slower."""
    return list(accumulate(reversed(times), min))[::-1]


def _interpolate(xs: IntArray, ys: FloatArray, x: FloatArray) -> FloatArray:
    """Straight lines between the points, and beyond the last two. `x` rises."""
    if len(xs) == 1:
        line: FloatArray = ys[0] * np.maximum(x, xs[0]) / xs[0]
        return line
    line = np.interp(x, xs, ys)
    if x[-1] > xs[-1]:
        line += (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) * np.maximum(x - xs[-1], 0)
    return line
