"""Measurements in a file of JSON lines, each written as soon as it is there, that a later run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soothsay.errors import SoothsayError


class Journal:
    """Entries behind a first line that says under which conditions they were measured.

    A last line that was cut short is dropped.

    Args:
        conditions: what makes entries comparable; as JSON has it.
        path: of the file; one that is there is continued. None keeps entries in memory only.

    Raises:
        SoothsayError: the file is of other conditions, or of something else.
    """

    def __init__(self, conditions: Mapping[str, Any], path: Path | None = None):
        self.conditions = dict(conditions)
        self.entries: list[dict[str, Any]] = []
        self._path = path
        if path is None:
            return
        whole = _whole_lines(path) if path.is_file() else b""
        if whole:
            before, self.entries = _parse(whole, path)
            both = {**conditions, **before}
            if differ := [key for key in both if before.get(key) != self.conditions.get(key)]:
                raise SoothsayError(f"{path} is of another run: other {', '.join(differ)}; give a new file")
        path.write_bytes(whole or json.dumps(self.conditions).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What a file holds. Raises `SoothsayError` if it is no journal or cannot be read."""
        try:
            whole = _whole_lines(path)
        except OSError as error:
            raise SoothsayError(f"{path} cannot be read ({error.strerror})") from None
        if not whole:
            raise SoothsayError(f"{path} does not hold measurements: it is empty")
        conditions, entries = _parse(whole, path)
        journal = cls(conditions)
        journal.entries = entries
        return journal

    def add(self, entry: Mapping[str, Any]) -> None:
        """Keep an entry, in the file too."""
        self.entries.append(dict(entry))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _whole_lines(path: Path) -> bytes:
    written = path.read_bytes()
    return written[: written.rfind(b"\n") + 1]


def _parse(whole: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        conditions, *entries = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise SoothsayError(f"{path} does not hold measurements ({error})") from None
    if not all(isinstance(line, dict) for line in (conditions, *entries)):
        raise SoothsayError(f"{path} does not hold measurements: a line is not a JSON object")
    return conditions, entries
