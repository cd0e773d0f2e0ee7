"""Files of what drafters have learned: written atomically, read with distrust.

A file holds the state of one drafter for one tenant, as safetensors. Its name has digests of the state's
identity and of the tenant, so models and tenants stay apart. It does not tell who the tenant is.

Several processes may share a directory, such as the engines of a server. Each writes files of its own, and
reads those of all. When it has written what it read, the files that it read are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from soothsay.core.request import RequestDrafter
from soothsay.core.tenant import State, Tenant
from soothsay.drafters.base import RememberingDrafter
from soothsay.errors import DrafterError
from soothsay.files import user_path, write_bytes

log = logging.getLogger("soothsay.drafters")

Remembering = RememberingDrafter[Any]

FORMAT = "soothsay learned 1"
"""What all files say that they are. The last word is the version."""

INDEX = "index."
"""Begin of the names of arrays that can be made of the others. They are not in the digest."""

MAX_FILE = 2**26
"""Size limit of a file in bytes. Token Recycling takes 25 MB at a vocabulary of 262,144, the others less."""

MAX_TOTAL = 2**28
"""Limit of bytes of all files of a directory. The files that were written longest ago are removed."""

MAX_FILES = 256
"""Limit of the number of files of a directory."""

MAX_PARTS = 64
"""Limit of files that are read for a tenant and a kind, the newest ones. Each is of one process."""

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
    about = {"format": FORMAT, "kind": kind, "identity": identity}
    content = save(arrays, {**about, "digest": array_digest(arrays)})
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
    if about.get("format") != FORMAT or about.get("kind") != kind:
        found = " ".join(str(about.get(key, "?"))[:60] for key in ("format", "kind"))
        raise DrafterError(
            f"{path} is not what {kind!r} has learned, in version {FORMAT.split()[-1]}; it says {found!r}"
        )
    if about.get("identity") != identity:
        raise DrafterError(
            f"{path} was made with another vocabulary or drafter, so it means something else here. Begin "
            "without it, and save a new one"
        )
    if about.get("digest") != array_digest(arrays):
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
        # what drafters have read: by the begin of the names, files and the times of their last changes
        self._read: WeakKeyDictionary[Remembering, dict[str, dict[Path, int]]] = WeakKeyDictionary()
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            with os.scandir(self.directory):
                pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise DrafterError(
                f"{self.directory} cannot keep what drafters learn ({why}); name a "
                "directory that can be written"
            ) from error

    def recall(self, drafter: RequestDrafter, tenant: Tenant) -> None:
        """Give a drafter what all processes have kept of a tenant, if it knows nothing of the tenant yet.

        A file that cannot be used is set aside under another name, and logged.
        """
        for learned in drafter.learned():
            if tenant not in learned.memories:
                name = _name(learned, tenant)
                parts = self._parts(name)
                read = {path: changed for path, changed in parts if self._restore(learned, tenant, path)}
                known = self._read.setdefault(learned, {})
                known.pop(name, None)
                if read:  # most tenants have no file, and their number has no limit
                    known[name] = read

    def _parts(self, name: str) -> list[tuple[Path, int]]:
        """The files of all processes with a state, and when they were changed; the newest last."""
        found = list[tuple[Path, int]]()
        for path in self.directory.glob(f"{name}*{SUFFIX}"):
            with suppress(OSError):  # another process has removed it
                found.append((path, path.stat().st_mtime_ns))
        return sorted(found, key=lambda part: part[1])[-MAX_PARTS:]

    def _restore(self, learned: Remembering, tenant: Tenant, path: Path) -> bool:
        """Take over a file. Returns whether it could be used."""
        try:
            learned.restore(tenant, read_learned(path, learned.kind, learned.identity))
        except DrafterError as error:
            aside = path.with_suffix(UNUSABLE)
            with suppress(OSError):
                path.replace(aside)
            log.warning("kept file set aside", extra={"reason": str(error), "moved_to": str(aside)})
            return False
        return True

    def save(self, drafters: Iterable[RequestDrafter]) -> int:
        """Write what drafters know. Returns the number of files.

        If two drafters of a kind know a tenant, the file of the one that knows more is written.

        Raises `DrafterError` if something cannot be written. Everything else is written then.
        """
        states: dict[str, tuple[Remembering, State]] = {}
        for drafter in drafters:
            for learned in drafter.learned():
                for tenant in list(learned.memories):
                    name, state = _name(learned, tenant), learned.memories[tenant].state()
                    least = _size(states[name][1]) if name in states else LEAST_BYTES - 1
                    if _size(state) > least:
                        states[name] = learned, state
        failures: list[DrafterError] = []
        for name, (learned, state) in states.items():
            own = self.directory / f"{name}-{self._process}{SUFFIX}"
            try:
                write_learned(own, learned.kind, learned.identity, state)
            except DrafterError as error:
                failures.append(error)
            else:
                self._remove_read(learned, name, own)
        self._make_room()
        if failures:
            raise failures[0]
        return len(states)

    def clear(self) -> None:
        """Remove all files. Those of others are left alone."""
        for path, _ in list(_kept_files(self.directory)):
            with suppress(OSError):
                path.unlink()

    @cached_property
    def _process(self) -> str:
        """This process, in names of files. Made at the first save: engines may be forks of one process."""
        return secrets.token_hex(4)

    def _remove_read(self, learned: Remembering, name: str, own: Path) -> None:
        """Remove the files of other processes that `own` contains, unless they have changed meanwhile."""
        for path, changed in self._read.get(learned, {}).pop(name, {}).items():
            with suppress(OSError):
                if path != own and path.stat().st_mtime_ns == changed:
                    path.unlink()

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


def _name(learned: Remembering, tenant: Tenant) -> str:
    """The begin of the names of a state's files."""
    identity = hashlib.blake2b(learned.identity.encode(), digest_size=6).hexdigest()
    return f"{learned.kind}-{identity}-{tenant.digest.hex()}"


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


def array_digest(arrays: State) -> str:
    """The digest of arrays with their names, without those of an index."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        if name.startswith(INDEX):
            continue
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
