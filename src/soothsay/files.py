"""Paths as users write them, and atomic writes: a reader finds the old content or the new content."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(0o666 if mode is None else mode, exist_ok=False)
    try:
        if mode is None and path.exists():
            shutil.copymode(path, temporary)
        yield temporary
        _flush_to_disk(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def _flush_to_disk(path: Path) -> None:
    """Without this, a crash soon after the rename may leave an empty file under the new name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
