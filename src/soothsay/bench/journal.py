"""Keeps measurements in a file of JSON lines, which a later run continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from soothsay import __version__
from soothsay.errors import SoothsayError
from soothsay.files import write_bytes
from soothsay.machine import processor_name

Entry = TypeVar("Entry")
"""A dataclass that is an entry of a journal."""


class Journal(Generic[Entry]):
    """Records by their keys, and the conditions under which they were measured.

    In the file the conditions are the first line. An entry is written when it is added. An incomplete last
    line, which a crash may leave, is dropped.

    Args:
        conditions: JSON values that must be equal for records to be comparable.
        path: the file; an existing file is continued. None: keep records in memory only.

    Raises:
        SoothsayError: the file has other conditions, or holds something else.
    """

    WHAT: ClassVar[str]
    """What the entries are, for errors: "runs of 'bench stack'"."""

    ENTRY: ClassVar[Callable[..., Any]]
    """Makes a record of an entry's fields."""

    KEY: ClassVar[Sequence[str]]
    """The attributes of a record that say what it measures. Records with equal ones replace each other."""

    def __init__(self, conditions: Mapping[str, Any], path: Path | None = None):
        self.conditions, self._path = dict(conditions), path
        self.entries: list[dict[str, Any]] = []
        self.by_key: dict[Any, Entry] = {}
        if path is None:
            return
        if whole := _whole_lines(path) if path.is_file() else b"":
            before, entries = _parse(whole, path)
            both = {**conditions, **before}
            if differ := [key for key in both if before.get(key) != self.conditions.get(key)]:
                raise SoothsayError(f"{path} is of another run: other {', '.join(differ)}; give a new file")
            self._read(entries, path)
        write_bytes(path, whole or json.dumps(self.conditions).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises `SoothsayError` if it holds something else or cannot be read."""
        try:
            whole = _whole_lines(path)
        except OSError as error:
            raise SoothsayError(f"{path} cannot be read ({error.strerror})") from None
        if not whole:
            raise SoothsayError(f"{path} does not hold measurements: it is empty")
        conditions, entries = _parse(whole, path)
        journal = cls(conditions)
        journal._read(entries, path)
        return journal

    def _read(self, entries: Sequence[dict[str, Any]], path: Path) -> None:
        self.entries += entries
        for entry in entries:
            try:
                self.read_entry(entry)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise SoothsayError(f"{path}: {self.WHAT} are expected ({error!r})") from None

    def read_entry(self, entry: Mapping[str, Any]) -> None:
        """Keep an entry of the file. Raises `TypeError`, `KeyError` and the like for anything else."""
        self.keep(self.ENTRY(**entry))

    def keep(self, record: Entry) -> None:
        """Keep a record. It replaces one with the same key."""
        self.by_key[tuple(getattr(record, name) for name in self.KEY)] = record

    def add(self, record: Entry) -> None:
        """Keep a record, and append it to the file."""
        self.keep(record)
        self.write(asdict(record))  # type: ignore[call-overload]

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry to the file."""
        self.entries.append(entry)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def __contains__(self, key: Hashable) -> bool:
        return key in self.by_key


def short_hash(text: str) -> str:
    """A hash by which a journal knows the questions of a run."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def conditions(plan: object, *names: str, **others: object) -> dict[str, Any]:
    """The conditions of a journal: fields of a plan, others, and where measurements are made."""
    chosen = {name: getattr(plan, name) for name in names}
    return {**chosen, **others, "processor": processor_name(), "soothsay": __version__}


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
