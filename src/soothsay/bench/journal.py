"""Keeps measurements in a file of JSON lines, which a later run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soothsay.errors import SoothsayError
from soothsay.files import write_bytes


class Journal:
    """A list of entries, and the conditions under which they were measured.

    In the file the conditions are the first line. An entry is written when it is added. An incomplete last
    line, which a crash may leave, is dropped.

    Args:
        conditions: JSON values that must be equal for entries to be comparable.
        path: the file; an existing file is continued. None: keep entries in memory only.

    Raises:
        SoothsayError: the file has other conditions, or holds something else.
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
        write_bytes(path, whole or json.dumps(self.conditions).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a file. Raises `SoothsayError` if it is not a journal or cannot be read."""
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
        """Append an entry, also to the file."""
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
