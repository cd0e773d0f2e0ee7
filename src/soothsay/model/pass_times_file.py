"""Times of passes on disk, and as values for JSON. Files are checked: anybody may have written them."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from soothsay.files import write_json
from soothsay.model.pass_times import PassTimes

KEPT_MEASUREMENTS = 5
"""Measurements that are made and kept on disk, each at a start of the engine. Their median is neither from a
busy moment nor from a lucky one. Later starts read it, and `PassTimes.follow` finds the machine's speed."""

MAX_FILE = 1 << 16
"""Limit of bytes in a file of measurements. It is written with about 4 KB."""

MAX_SECONDS = 3600.0
"""Limit of a time in a file. A pass that takes longer serves nobody."""

MAX_NUMBER = 1 << 30
"""Limit of rows and of context tokens in a file."""


def read_measurements(file: Path) -> list[PassTimes]:
    """The measurements in a file, the newest last; none if there is no file.

    Raises `OSError`, `ValueError` or `RecursionError` if the file cannot be read, or is damaged.
    """
    try:
        found = file.stat()
    except FileNotFoundError:
        return []
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE:  # a pipe would keep its reader waiting
        raise ValueError(f"it is not a file of at most {MAX_FILE} bytes")
    return parse_measurements(json.loads(file.read_text("utf-8")))


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


def write_measurements(file: Path, measured: Sequence[PassTimes]) -> None:
    """Keep measurements on disk for the next start. Raises `OSError` if the disk cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.is_file():  # a pipe would keep its writer waiting
        raise OSError("it is not a file")
    write_json(file, measurements_as_json(measured))
