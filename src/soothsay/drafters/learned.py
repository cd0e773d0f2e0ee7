"""Files of what drafters have learned: written atomically, read with distrust.

A file holds the state of one `Learned` for one tenant, as safetensors. Its name has digests of the state's
identity and of the tenant, so models and tenants stay apart. It does not tell who the tenant is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from soothsay.core.learned import Learned, State
from soothsay.core.request import RequestDrafter
from soothsay.core.tenant import Tenant
from soothsay.errors import DrafterError
from soothsay.files import user_path, write_bytes

log = logging.getLogger("soothsay.drafters")

VERSION = "1"

MAX_FILE = 2**26
"""Size limit of a file in bytes. Token Recycling takes 25 MB at a vocabulary of 262,144, the others less."""

MAX_TOTAL = 2**28
"""Limit of bytes of all files of a directory. The files that were written longest ago are removed."""

MAX_FILES = 256
"""Limit of the number of files of a directory."""

LEAST_BYTES = 128
"""A smaller state, of some ten tokens, is not worth a file. A server's own requests leave such states."""

SUFFIX, UNUSABLE = ".learned", ".unusable"

PRIVATE = 0o600
"""Permissions of files: they hold what users wrote, and what they were answered."""


def write_learned(path: Path, kind: str, identity: str, state: State) -> int:
    """Write a state to a file, and return its size in bytes.

    Raises `DrafterError` if it has more than `MAX_FILE` bytes, or cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
    about = {"format": f"soothsay learned {VERSION}", "kind": kind, "identity": identity}
    content = save(arrays, {**about, "digest": _digest(arrays)})
    if len(content) > MAX_FILE:
        raise DrafterError(f"{path}: {len(content):,} bytes were learned, and {MAX_FILE:,} is the limit")
    try:
        write_bytes(path, content, PRIVATE)
    except OSError as error:
        raise DrafterError(f"{path} cannot be written ({error.strerror or error})") from error
    return len(content)


def read_learned(path: Path, kind: str, identity: str) -> dict[str, npt.NDArray[np.generic[Any]]]:
    """Read a state that `write_learned` wrote.

    Raises `DrafterError` if the file is missing, too large or damaged, or is of another version, kind or
    identity.
    """
    content = _read(path)
    try:
        arrays = load(content)
        about = _metadata(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DrafterError(f"{path} cannot be read: it is damaged, or something else ({error})") from None
    if about.get("format") != f"soothsay learned {VERSION}" or about.get("kind") != kind:
        found = " ".join(str(about.get(key, "?"))[:60] for key in ("format", "kind"))
        raise DrafterError(
            f"{path} is not what {kind!r} has learned, in version {VERSION}; it says {found!r}"
        )
    if about.get("identity") != identity:
        raise DrafterError(
            f"{path} was made with another vocabulary or drafter, so it means something else here. Begin "
            "without it, and save a new one"
        )
    if about.get("digest") != _digest(arrays):
        raise DrafterError(f"{path} is damaged: its content does not have its digest")
    return arrays


class LearnedFiles:
    """A directory of what drafters have learned.

    Args:
        directory: is made if it is missing.

    Raises `DrafterError` if there can be no such directory.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = user_path(directory)
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            with os.scandir(self.directory):
                pass
        except OSError as error:
            raise DrafterError(
                f"{self.directory} cannot keep what drafters learn ({error.strerror or error}); name a "
                "directory that can be written"
            ) from error

    def recall(self, drafter: RequestDrafter, tenant: Tenant) -> None:
        """Give a drafter what was kept of a tenant, if it knows nothing of the tenant yet.

        A file that cannot be used is set aside under another name, and logged.
        """
        for learned in drafter.learned():
            if tenant in learned.tenants():
                continue
            path = self._path(learned, tenant)
            if not path.exists():
                continue
            try:
                learned.restore(tenant, read_learned(path, learned.kind, learned.identity))
            except DrafterError as error:
                aside = path.with_suffix(UNUSABLE)
                with suppress(OSError):
                    path.replace(aside)
                log.warning("kept file set aside", extra={"reason": str(error), "moved_to": str(aside)})

    def save(self, drafters: Iterable[RequestDrafter]) -> int:
        """Write what drafters know. Returns the number of files.

        If two drafters of a kind know a tenant, the file of the one that knows more is written.

        Raises `DrafterError` if something cannot be written. Everything else is written then.
        """
        states: dict[Path, tuple[Learned, State]] = {}
        for drafter in drafters:
            for learned in drafter.learned():
                for tenant in list(learned.tenants()):
                    path, state = self._path(learned, tenant), learned.state(tenant)
                    least = _size(states[path][1]) if path in states else LEAST_BYTES - 1
                    if _size(state) > least:
                        states[path] = learned, state
        failures: list[DrafterError] = []
        for path, (learned, state) in states.items():
            try:
                write_learned(path, learned.kind, learned.identity, state)
            except DrafterError as error:
                failures.append(error)
        self._make_room()
        if failures:
            raise failures[0]
        return len(states)

    def clear(self) -> None:
        """Remove all files. Those of others are left alone."""
        for path, _ in list(_kept_files(self.directory)):
            with suppress(OSError):
                path.unlink()

    def _path(self, learned: Learned, tenant: Tenant) -> Path:
        identity = hashlib.blake2b(learned.identity.encode(), digest_size=6).hexdigest()
        return self.directory / f"{learned.kind}-{identity}-{tenant.digest.hex()}{SUFFIX}"

    def _make_room(self) -> None:
        """Remove the oldest files while there are too many, or too many bytes. Files of others stay."""
        found = sorted(_kept_files(self.directory), key=lambda one: one[1].st_mtime)
        total, left = sum(about.st_size for _, about in found), len(found)
        for path, about in found:
            if total <= MAX_TOTAL and left <= MAX_FILES:
                return
            left -= 1
            with suppress(OSError):
                path.unlink()
            total -= about.st_size


def _kept_files(directory: Path) -> Iterable[tuple[Path, os.stat_result]]:
    """The files that a `LearnedFiles` has written or set aside."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, UNUSABLE)) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _size(state: State) -> int:
    return sum(array.nbytes for array in state.values())


def _read(path: Path) -> bytes:
    """The bytes of a file. It is not mapped: a file that shrinks meanwhile would end the process."""
    try:
        if not path.is_file():  # a pipe would keep its reader waiting
            raise DrafterError(f"{path} cannot be read: it is missing, or is not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise DrafterError(f"{path} cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_FILE:
        raise DrafterError(f"{path} cannot be read: it has more than {MAX_FILE:,} bytes")
    return content


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of safetensors that were loaded without an error."""
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    return about if isinstance(about, dict) else {}


def _digest(arrays: State) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
