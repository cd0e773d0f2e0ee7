"""Reads conversations and texts from files: JSON lines, plain text, and directories of `datasets`."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soothsay.errors import RequestError
from soothsay.tokenizer import Message

Entry = str | list[Message]
"""A text, or a conversation: messages with `role` and `content`, both text."""

MOST_BAD = 0.01
"""Largest share of unusable entries. With more, something is wrong with the file, not with single lines."""

NAMED = 5
"""Number of unusable entries that are listed. The others are only counted."""


@dataclass(slots=True)
class Tally:
    """Counts the entries of a file, and those that cannot be used."""

    read: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # the place and the reason of the first unusable entries

    def refuse(self, where: str, reason: object) -> None:
        """Count an entry as unusable. `where` is its place, such as "chat.jsonl, line 3"."""
        self.bad += 1
        if len(self.named) < NAMED:
            self.named.append(f"{where}: {reason}")

    def check(self) -> None:
        """Raise `RequestError`, with examples, if too many entries are unusable."""
        if self.bad > MOST_BAD * self.read:
            shown = "; ".join(self.named)
            more = f"; and {self.bad - len(self.named)} more" if self.bad > len(self.named) else ""
            raise RequestError(
                f"{self.bad} of {self.read} entries cannot be used, more than {MOST_BAD:.0%}: {shown}{more}"
            )


def read_entries(path: Path, tally: Tally) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a file or a directory, each with its place, such as "chat.jsonl, line 3".

    - `.jsonl` or `.json`: an object in each line, with `messages` or with `text`; see `parse`.
    - A directory that `datasets` has saved to disk: its rows have the same keys. If it has several splits,
      "train" is read.
    - Any other file is one text.

    A name that ends in `.gz` says that the file is compressed. Entries that cannot be used are counted in
    `tally` and left out.

    Raises `RequestError` if the file or the directory cannot be read.
    """
    if path.is_dir():
        items: Iterator[tuple[str, bytes | Mapping[str, Any]]] = _rows(path)
    elif has_lines(path):
        items = ((f"{path}, line {number}", line) for number, line in read_lines(path))
    else:
        tally.read += 1
        yield str(path), read_text(path)
        return
    for where, item in items:
        tally.read += 1
        try:
            entry = parse(item) if isinstance(item, bytes) else as_entry(item)
        except ValueError as error:
            tally.refuse(where, error)
        else:
            yield where, entry


def has_lines(file: Path) -> bool:
    """Whether a file's name says that it holds JSON lines."""
    return file.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Only line feeds end a line: JSON strings may contain other line separators.

    Raises `RequestError` if the file cannot be read.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{file} cannot be read as text ({error})") from None


def read_text(file: Path) -> str:
    """Read a whole file. Raises `RequestError` if it cannot be read, or is not UTF-8."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            return content.read().decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read as text ({error})") from None


def parse(line: bytes) -> Entry:
    """Return the `text` of a JSON line, or else its `messages`. Raises `ValueError` if it has neither."""
    try:
        raw: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"a JSON object is expected, not {line.decode().strip()[:40]!r}")
    return as_entry(raw)


def as_entry(raw: Mapping[str, Any]) -> Entry:
    """Return the text or the conversation of a JSON object; see `parse`."""
    text, messages = raw.get("text"), raw.get("messages")
    if isinstance(text, str):
        _check(text)
        return text
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ValueError("neither a 'text' nor 'messages' with 'role' and 'content'")
    if not messages:
        raise ValueError("'messages' is empty")
    for message in messages:
        _check(message["content"])
    return messages


def plain(messages: list[Message]) -> str:
    """Lay a conversation out for a model without a chat template: blank lines between messages."""
    return "\n\n".join(message["content"] for message in messages)


def _check(text: str) -> None:
    """Raise `ValueError` if `text` cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair
        raise ValueError("half of a surrogate pair, which is no text") from None


def _rows(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise RequestError(
            f"{directory} is a directory: reading a data set from it needs the package 'datasets' "
            "(pip install datasets); or give files of JSON lines"
        ) from None
    try:
        data = datasets.load_from_disk(str(directory))
    except (OSError, ValueError) as error:
        raise RequestError(f"{directory} cannot be read as a data set ({error})") from None
    if isinstance(data, Mapping):  # several splits by name
        if "train" not in data:
            splits = ", ".join(map(str, data))
            raise RequestError(f"{directory} has no split 'train'; name one of its own directories: {splits}")
        data = data["train"]
    for number, row in enumerate(data):
        yield f"{directory}, row {number}", row
