"""The file of API keys. It holds hashes of the keys; a key itself is shown once, when it is made.

A key has 256 random bits, so one round of SHA-256 protects it as well as a slow hash.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from soothsay.errors import SoothsayError
from soothsay.files import locked, write_json
from soothsay.server.access.accounts import Account, Key
from soothsay.server.http.api_errors import in_words
from soothsay.server.http.json_log import log
from soothsay.server.http.safe_json import JsonError, read_json

MAX_FILE = 1 << 20
"""Limit of bytes in a file of keys, four times what `MAX_KEYS` keys usually need."""

MAX_KEYS = 1000
"""Limit of keys in a file. Each request is compared with all of them, which takes 0.2 ms."""

PATIENCE = 10.0
"""Seconds to wait while other processes change a file of keys. A change takes some milliseconds."""

RETRY = 1.0
"""Seconds after which a file that could not be read is tried again, even if it seems unchanged."""


class KeyFileError(SoothsayError):
    """A file of API keys cannot be read or changed."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: Annotated[list[Key], Field(max_length=MAX_KEYS)]


def read_keys(path: Path) -> list[Key]:
    """Read the keys of a file. Raises `KeyFileError`, which names the entry that is wrong."""
    _check_kind(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}); make it with: soothsay keys add NAME"
        raise KeyFileError(problem) from None
    if len(content) > MAX_FILE:
        raise KeyFileError(f"{path} is not a file of API keys: it has more than {MAX_FILE} bytes")
    try:
        value = read_json(content)
        keys = _KeyFile.model_validate(value).keys
    except JsonError as error:
        where = f" in {error.field}" if error.field else ""
        raise KeyFileError(f"{path} is not a file of API keys{where}: {error}") from None
    except ValidationError as error:
        place, problem = _first(error)
        where = _entry(value, place)
        raise KeyFileError(f"{path} is not a file of API keys: {where}: {problem}") from None
    for name, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
        if len(set(values)) < len(values):
            raise KeyFileError(f"{path} is not a file of API keys: two entries have the same {name}")
    return keys


def _check_kind(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise KeyFileError(f"{path} is not a file of API keys, but a folder or a device")


def _first(error: ValidationError) -> tuple[tuple[int | str, ...], str]:
    """The place of the first error, and what is wrong there."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return first["loc"], in_words(first)


def _entry(value: Any, place: tuple[int | str, ...]) -> str:
    """The place of an error in words, with the name of the key if it has one."""
    match place:
        case ("keys", int(index), *fields):
            entry = value["keys"][index]
            name = entry.get("name") if isinstance(entry, dict) else None
            named = f" ({name[:256]!r})" if isinstance(name, str) else ""
            return ".".join([f"entry {index + 1}{named}", *map(str, fields)])
    return ".".join(map(str, place)) or "the whole"


def add_key(path: Path, name: str, **grants: Any) -> str:
    """Make a key, add it to a file, and return its secret. Creates the file. Raises `KeyFileError`.

    Args:
        path: the file.
        name: of the key. The log shows it.
        grants: limits and permissions, as in `Key`.
    """
    secret = f"sk-{secrets.token_urlsafe(32)}"
    try:
        key = Key(name=name, sha256=_hash(secret), **grants)
    except ValidationError as error:
        place, problem = _first(error)
        raise KeyFileError(f"{'.'.join(map(str, place))}: {problem}") from None
    with _changing(path):
        keys = read_keys(path) if path.exists() else []
        if any(key.name == name for key in keys):
            raise KeyFileError(f"{path} has a key named {name!r}; remove it first, or choose another name")
        if len(keys) >= MAX_KEYS:
            raise KeyFileError(f"{path} has {MAX_KEYS} keys, and more are not possible; remove some")
        _write(path, [*keys, key])
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file. Raises `KeyFileError` if it is not there."""
    with _changing(path):
        keys = read_keys(path)
        if all(key.name != name for key in keys):
            raise KeyFileError(f"{path} has no key named {name!r}")
        _write(path, [key for key in keys if key.name != name])


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Let no other process read and replace a file meanwhile: its change would be lost, or this one.

    Raises `KeyFileError` if the file cannot be changed.
    """
    _check_kind(path)
    real = Path(os.path.realpath(path))
    try:
        with locked(real.with_name(f".{real.name}.lock"), PATIENCE):
            yield
    except BlockingIOError:
        raise KeyFileError(f"another process changes {path}, and does not end; nothing was changed") from None
    except OSError as error:
        reason = error.strerror or error
        raise KeyFileError(f"{path} cannot be changed ({reason}); its folder must allow to write") from None


def _write(path: Path, keys: list[Key]) -> None:
    """Write a file that only its owner can read."""
    write_json(path, {"keys": [key.model_dump() for key in keys]}, indent=2, mode=0o600)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _given_account(secret: str, number: int) -> Account:
    """The account of a key of --api-key. Raises `KeyFileError` for a key that no client can send."""
    if not re.fullmatch(r"[!-~]{8,256}", secret):
        raise KeyFileError(
            f"key {number} of --api-key has {len(secret)} characters: a key has 8 to 256 printable ones of "
            "ASCII and no space, or else no client can send it"
        )
    if Path(secret).is_file():
        raise KeyFileError(f"key {number} of --api-key names a file; a file of keys is given with --api-keys")
    return Account(Key(name=f"--api-key {number}", sha256=_hash(secret)))


class KeyRing:
    """The keys of a file, and those of --api-key. Reads the file again when it changes.

    A key keeps its account when its name or its limits change. Another key with its name has an account of
    its own.

    While the file cannot be read, no key of it is valid.

    Args:
        path: the file; None: there is none.
        given: further keys, which have no limits and no permissions. The log calls them "--api-key 1", ...
        clock: seconds, from any starting point.

    Raises `KeyFileError` if the file cannot be read at first, or a given key cannot be one.
    """

    def __init__(
        self, path: Path | None, given: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ):
        self._path, self._clock = path, clock
        self._problem: str | None = None
        self._stamp = self._stat()
        self._given = [_given_account(secret, number) for number, secret in enumerate(given, 1)]
        self._accounts = [] if path is None else [Account(key) for key in read_keys(path)]
        self._warn_of_access()
        self._retry_at = 0.0

    def find(self, secret: str) -> Account | None:
        """The account of a key, or None. Takes the same time whether a key is nearly right or wrong.

        Raises `KeyFileError` for an unknown key while the file cannot be read.
        """
        problem = None
        try:
            self.check()
        except KeyFileError as error:
            problem = error
        given, found = _hash(secret), None
        for account in (*self._given, *([] if problem else self._accounts)):
            if hmac.compare_digest(account.key.sha256, given):
                found = account
        if found is None and problem is not None:
            raise problem
        return found

    def check(self) -> None:
        """Read the file if it has changed. Raises `KeyFileError` while it cannot be read."""
        if self._path is None:
            return
        now, stamp = self._clock(), self._stat()
        if stamp != self._stamp or (self._problem is not None and now >= self._retry_at):
            self._stamp, self._retry_at = stamp, now + RETRY
            self._read()
        if self._problem is not None:
            raise KeyFileError(self._problem)

    def _read(self) -> None:
        assert self._path is not None
        known = {account.key.sha256: account for account in self._accounts}
        try:
            keys = read_keys(self._path)
        except KeyFileError as error:
            if str(error) != self._problem:
                log.error("API keys cannot be read; no key is valid until then", extra={"reason": str(error)})
            self._problem = str(error)
            return
        self._accounts = [known.get(key.sha256) or Account(key) for key in keys]
        for account, key in zip(self._accounts, keys, strict=True):
            account.change(key)
        self._problem = None
        self._warn_of_access()
        log.info("API keys read", extra={"keys": len(keys)})

    def _warn_of_access(self) -> None:
        if self._stamp is not None and self._stamp[0] & 0o077:
            mode = f"{stat.S_IMODE(self._stamp[0]):o}"
            log.warning("other users have access to the file of API keys; chmod 600 it", extra={"mode": mode})

    def _stat(self) -> tuple[int, ...] | None:
        """The file's mode, and what else changes with the file; None: there is none."""
        if self._path is None:
            return None
        try:
            state = self._path.stat()
        except OSError:
            return None
        return state.st_mode, state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino
