"""Paths as users write them. Replaces files atomically, and reads files from strangers within bounds.

A reader of a replaced file finds the old content or the new content, never a part of either.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from soothsay.errors import ModelError, shown, type_of

MAX_JSON_BYTES = 2**25
"""Size limit of a JSON file of a model in bytes. The index of a model with 90,000 tensors takes 9 MB."""

MAX_JSON_VALUES = 2_000_000
"""Limit of values in a JSON file. A value takes up to 100 bytes of memory, for 3 bytes in the file."""

MAX_JSON_DEPTH = 64
"""Limit of nesting in a JSON file. Configurations are nested 5 deep."""

MAX_TEXT_BYTES = 2**20
"""Size limit of a text file of a model, such as a chat template, in bytes. Long templates take 30 kB."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it, with `~` replaced. Without a home directory, `~` stays."""
    return Path(os.path.expanduser(path))


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary, empty file beside `path`, and rename it to `path` when the block ends.

    The content is on the disk before the rename, so a crash leaves the old file or the new one. If the block
    raises, the temporary file is removed and `path` stays as it was. A `path` that is a device or a pipe is
    yielded itself.

    Args:
        path: the file to write; its directory must exist.
        mode: permissions. None: those of the file that is replaced, or the usual ones.

    Raises `OSError` if the file cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays a link: the file that it names is replaced
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        temporary.touch(0o666 if mode is None else mode, exist_ok=False)
        if mode is None and path.exists():
            shutil.copymode(path, temporary)
        yield temporary
        _flush_to_disk(temporary)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # which people know
        raise


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes, and threads, from locking the same file until the block ends.

    For files that are read, changed and replaced. A lock on such a file itself would stay with the old file.

    Args:
        path: of the lock, an empty file. It is made, and stays.
        patience: seconds to wait for another process.

    Raises:
        BlockingIOError: another process still has the lock.
        OSError: the file cannot be made or locked.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        lock(file, patience)
        yield
    finally:
        os.close(file)


def lock(file: int, patience: float = 0.0) -> None:
    """Lock an open file until it is closed. Raises as `locked` does. Windows has none: nothing happens."""
    try:
        import fcntl
    except ImportError:
        return
    due = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= due:
                raise
            time.sleep(0.01)


def write_bytes(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a whole file; see `replacing`."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a whole file as UTF-8; see `replacing`."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, content: Any, *, indent: int | None = None, mode: int | None = None) -> None:
    """Write a whole file that holds one JSON value; see `replacing`."""
    write_text(path, json.dumps(content, indent=indent) + "\n", mode)


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a model's file that holds one JSON object, such as config.json.

    Raises `ModelError`, which names the file, if it is missing, too large, nested too deep, not valid
    JSON, or holds another value than an object.
    """
    content = read_model_bytes(file, MAX_JSON_BYTES)
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > MAX_JSON_VALUES:
        raise ModelError(
            f"{file} holds {values:,} values, and {MAX_JSON_VALUES:,} is the limit; check its origin"
        )
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ModelError(_too_deep(file)) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and integers with too many digits
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object, not {type_of(value)}")
    if levels_of(value) > MAX_JSON_DEPTH + 1:
        raise ModelError(_too_deep(file))
    return value


def read_model_text(file: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Read a model's text file. Raises `ModelError` if it is missing, too large, or not UTF-8."""
    try:
        return read_model_bytes(file, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8 text ({error}); download it again") from error


def check_place(path: Path) -> None:
    """Raise `ModelError` if the system does not look for a path, such as one that is too long."""
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"{shown(str(path), 200)} cannot be read ({error.strerror or error})") from error


def check_size(file: Path, limit: int) -> None:
    """Raise `ModelError` if a model's file is larger than `limit` bytes, or is not a regular file."""
    check_place(file)
    if not file.is_file():
        raise ModelError(f"{file} is missing, or is not a file; a model directory needs it")
    size = file.stat().st_size
    if size > limit:
        raise ModelError(
            f"{file} has {size:,} bytes, and {limit:,} is the limit for its kind; check its origin"
        )


def read_model_bytes(file: Path, limit: int) -> bytes:
    """Read a model's file. Raises `ModelError` if it is missing, or has over `limit` bytes."""
    check_size(file, limit)
    try:
        with file.open("rb") as opened:
            return opened.read(limit)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror or error})") from error


def _too_deep(file: Path) -> str:
    return f"{file} is nested deeper than {MAX_JSON_DEPTH} levels; check its origin"


def levels_of(value: Any) -> int:
    """In how many levels lists and objects are nested in a value, which counts as one."""
    count, level = 0, [value]
    while level:
        count += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return count


def _flush_to_disk(path: Path) -> None:
    """Without this, a crash soon after the rename may leave an empty file under the new name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
