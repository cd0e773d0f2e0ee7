"""T(rows, context): the seconds that one pass of the target takes, as a curve that follows the machine.

Speculation pays because a pass of 16 rows costs little more than a pass of one row. How much more depends on
the model, the number format and the machine. So it is measured (`pass_measuring`), and remembered on disk
(`known_times`). Files are checked: anybody may have written them.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from soothsay.files import write_json
from soothsay.model.ops.routing import ExpertRows

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

    Numbers are in lists: there are few, and between two passes of a small model arrays would take longer.

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
        self._scales = [0.0] * len(self.rows)  # seconds of real passes / measured ones; 0: none was run yet
        self.experts = None if experts is None else ExpertRows(rows, experts)

    @property
    def total(self) -> float:
        """Seconds of all measured passes together."""
        return sum(map(sum, self.seconds))

    def __call__(self, rows: int, context: float = 0.0, requests: int = 1) -> float:
        """Seconds of a pass of `rows` rows of some requests, with `context` tokens before each on average."""
        return self.span(rows, 0, context, requests)[0]

    def span(self, rows: int, more: int, context: float, requests: int = 1) -> list[float]:
        """`more + 1` times, in seconds: of passes of `rows`, `rows + 1`, ..., `rows + more` rows.

        Passes were measured with rows of one request, which read one context. Each of several requests takes
        the additional time of a longer context for its share of the rows.
        """
        curve = self.seconds[0]
        if len(self.contexts) > 1:
            share = (context - self.contexts[0]) / (self.contexts[-1] - self.contexts[0]) * requests
            added = [far - near for near, far in zip(curve, self.seconds[-1], strict=True)]
            if requests > 1:
                added = _on_curve(self.rows, added, [count / requests for count in self.rows])
            curve = [near + own * share for near, own in zip(curve, added, strict=True)]
        if self._scales[0]:  # they move apart, and more rows must not seem to cost less
            curve = [*accumulate(map(mul, curve, self._scales), max)]
        asked = map(self._counted, range(rows, rows + more + 1))
        return [max(seconds, MIN_SECONDS) for seconds in _on_curve(self.rows, curve, asked)]

    def _counted(self, rows: int) -> float:
        """Rows as the measured passes count them, whose tokens are unrelated."""
        return rows if self.experts is None else self.experts(rows)

    def follow(
        self, rows: int, context: float, seconds: float, experts: float | None = None, requests: int = 1
    ) -> None:
        """Learn from a pass that the engine ran. `seconds` includes sampling and moving the accepted KV.

        A pass that the machine delayed counts at most `MAX_JUMP` times the known time. `experts` is how many
        experts a layer ran on average.
        """
        if self.experts is not None and experts is not None:
            self.experts.follow(rows, experts)
        ratio = seconds / self(rows, context, requests)
        if not self._scales[0]:
            self._scales = [ratio] * len(self.rows)
            return
        more = min(max(ratio, 1 / MAX_JUMP), MAX_JUMP) - 1
        places = range(len(self.rows))
        [here] = _on_curve(self.rows, places, [min(self._counted(rows), self.rows[-1])])
        near = [max(1 - abs(place - here), 0) for place in places]
        weights = [SCALE_WEIGHT + ROW_SCALE_WEIGHT * share for share in near]
        self._scales = [old * (1 + weight * more) for old, weight in zip(self._scales, weights, strict=True)]

    @classmethod
    def agreed(cls, several: Sequence[PassTimes]) -> PassTimes:
        """Combine several measurements of the same passes, the newest last. See `of`."""
        seconds = np.array([times.seconds for times in several])  # [measurement, context, rows]
        totals = seconds.sum((1, 2), keepdims=True)
        median = np.median(seconds / totals, axis=0) * totals[-1]
        newest = several[-1]
        experts = None if newest.experts is None else newest.experts.experts
        return cls(newest.rows, newest.contexts, median.tolist(), experts)


def _without_delays(times: Sequence[float]) -> list[float]:
    """The least of each time and those of more rows, which never cost less: noise makes passes slower."""
    return list(accumulate(reversed(times), min))[::-1]


def _on_curve(xs: Sequence[int], ys: Sequence[float], asked: Iterable[float]) -> list[float]:
    """Straight lines between points, and beyond the last two; level before the first one. `asked` rises."""
    if len(xs) == 1:
        return [ys[0] * max(x, xs[0]) / xs[0] for x in asked]
    right, last, found = 1, len(xs) - 1, list[float]()
    for x in asked:
        while right < last and x > xs[right]:
            right += 1
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        found.append(ys[right] + slope * (max(x, xs[0]) - xs[right]))
    return found


KEPT_MEASUREMENTS = 5
"""Measurements that are kept on disk. Their median is neither from a busy moment nor from a lucky one. Later
starts read it, and `PassTimes.follow` finds the machine's speed."""

MAX_FILE = 1 << 16
"""Limit of bytes in a file of measurements. It is written with about 4 KB."""

MAX_SECONDS = 3600.0
"""Limit of a time in a file. A pass that takes longer serves nobody."""

MAX_NUMBER = 1 << 30
"""Limit of rows and of context tokens in a file."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of the same passes, the newest last.

    Example:
        On a busy machine two brief ones are kept, and both are disturbed. The first that nothing disturbs
        takes their place. The first one of all sizes takes its place, unless something disturbed it.
    """

    passes: Sequence[PassTimes] = ()
    is_quiet: bool = True  # whether other processes left the machine alone

    @property
    def agreed(self) -> PassTimes | None:
        """What they say together; None if there are none."""
        return PassTimes.agreed(self.passes) if self.passes else None

    def with_newest(self, newest: PassTimes, is_quiet: bool) -> Measurements:
        """These with one more. A disturbed one never takes the place of quiet ones."""
        if self.passes and self.is_quiet and not is_quiet:
            return self
        sizes = newest.rows, newest.contexts
        same = [old for old in self.passes if (old.rows, old.contexts) == sizes]
        same = same if is_quiet == self.is_quiet else []
        return Measurements([*same, newest][-KEPT_MEASUREMENTS:], is_quiet)

    @classmethod
    def read(cls, file: Path) -> Measurements:
        """Those in a file; none if there is no file.

        Raises `OSError`, `ValueError` or `RecursionError` if the file cannot be read, or is damaged.
        """
        try:
            found = file.stat()
        except FileNotFoundError:
            return cls()
        # a pipe would keep its reader waiting
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE:
            raise ValueError(f"it is not a file of at most {MAX_FILE} bytes")
        content = json.loads(file.read_text("utf-8"))
        return cls(parse_measurements(content), content.get("quiet") is True)

    def write(self, file: Path) -> None:
        """Keep them on disk for the next start. Raises `OSError` if the disk cannot be written."""
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():  # a pipe would keep its writer waiting
            raise OSError("it is not a file")
        write_json(file, {**measurements_as_json(self.passes), "quiet": self.is_quiet})


def measurements_as_json(measured: Sequence[PassTimes]) -> dict[str, Any]:
    """Several measurements of the same passes, at least one, as a value for JSON."""
    newest = measured[-1]
    seconds = [times.seconds for times in measured]
    content = {"rows": newest.rows, "contexts": newest.contexts, "measured": seconds}
    return content if newest.experts is None else {**content, "experts": newest.experts.experts}


def parse_measurements(content: object) -> list[PassTimes]:
    """The inverse of `measurements_as_json`. Raises `ValueError` if the value has another form."""
    fields = content if isinstance(content, dict) else {}
    rows, contexts, measured = (fields.get(name) for name in ("rows", "contexts", "measured"))
    if not _is_rising(rows) or not _is_rising(contexts) or not isinstance(measured, list) or not measured:
        raise ValueError("it has no measurements")
    shape = (len(measured), len(contexts), len(rows))
    times = [_seconds(one, shape[1:]) for one in measured[-KEPT_MEASUREMENTS:]]
    experts = fields.get("experts")
    if experts is not None and not (_are_counts(experts) and len(experts) == len(rows)):
        raise ValueError(f"it has not {len(rows)} numbers of experts")
    return [PassTimes(rows, contexts, seconds, experts) for seconds in times]


def _are_counts(numbers: object) -> TypeGuard[list[float]]:
    """Whether something is a list of numbers from 1 on."""
    return isinstance(numbers, list) and all(type(n) is float and 1 <= n <= MAX_NUMBER for n in numbers)


def _is_rising(numbers: object) -> TypeGuard[list[int]]:
    """Whether something is a list of rising positive integers, at least one."""
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        return False
    return all(low < high for low, high in pairwise([0, *numbers])) and numbers[-1] <= MAX_NUMBER


def _seconds(table: object, shape: tuple[int, ...]) -> list[list[float]]:
    """A table of positive seconds of a shape. Raises `ValueError` if it is not one."""
    rows = table if isinstance(table, list) else []
    if len(rows) != shape[0] or not all(isinstance(row, list) and len(row) == shape[1] for row in rows):
        raise ValueError(f"a measurement has not the shape {shape}")
    numbers = [number for row in rows for number in row]
    if not all(isinstance(number, float) and 0 < number <= MAX_SECONDS for number in numbers):
        raise ValueError(f"a time is not a number above 0 and at most {MAX_SECONDS}")
    return rows
