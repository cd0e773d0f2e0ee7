"""API keys: who may ask, and how much. A file holds their hashes; the keys themselves are shown once.

A key is 256 random bits, so that one round of SHA-256 hides it as well as any slow hash would.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from soothsay.errors import SoothsayError


class KeyFileError(SoothsayError):
    """A file of API keys cannot be read or changed as asked."""


@dataclass(frozen=True)
class Key:
    """Someone who may ask."""

    name: str
    sha256: str  # of the key, hexadecimal
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises `KeyFileError`."""
    try:
        return [Key(**entry) for entry in json.loads(path.read_text())["keys"]]
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read ({error.strerror}); make it: soothsay keys add") from None
    except (ValueError, TypeError, KeyError):
        raise KeyFileError(f"{path} is no file of API keys; make one: soothsay keys add") from None


def add_key(
    path: Path, name: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
) -> str:
    """Add a key to a file, which is made if need be, and return it. Raises `KeyFileError`."""
    keys = read_keys(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise KeyFileError(f"{path} has a key named {name!r}; remove it first, or choose another name")
    secret = f"sk-{secrets.token_urlsafe(32)}"
    _write(path, [*keys, Key(name, _hash(secret), requests_per_minute, tokens_per_minute)])
    return secret


def remove_key(path: Path, name: str) -> None:
    """Take a key out of a file. Raises `KeyFileError` if it is not there."""
    keys = read_keys(path)
    if all(key.name != name for key in keys):
        raise KeyFileError(f"{path} has no key named {name!r}")
    _write(path, [key for key in keys if key.name != name])


def _write(path: Path, keys: list[Key]) -> None:
    """Whole or not at all, for its owner's eyes only."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.touch(mode=0o600)
    new.write_text(json.dumps({"keys": [asdict(key) for key in keys]}, indent=2) + "\n")
    os.replace(new, path)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


class Allowance:
    """So much a minute, and no more than a minute's worth at once.

    What is charged may exceed what is left, for the length of an answer is known only at its end; then there
    is nothing to be had until the debt is paid.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic):
        self._rate = None if per_minute is None else per_minute / 60
        self._most = float(per_minute or 0)
        self._clock = clock
        self._left, self._at = self._most, clock()

    def wait(self, least: float = 1.0) -> float:
        """Seconds until `least` can be had; 0: now."""
        if self._rate is None:
            return 0.0
        self._refill()
        missing = min(least, self._most) - self._left
        return max(missing / self._rate, 0.0) if self._rate else 60.0

    def charge(self, amount: float) -> None:
        """Take it, and go into debt if need be."""
        if self._rate is not None:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * (self._rate or 0.0), self._most)
        self._at = now


class Account:
    """What a key has left."""

    def __init__(self, key: Key):
        self.key = key
        self.requests = Allowance(key.requests_per_minute)
        self.tokens = Allowance(key.tokens_per_minute)

    def wait(self) -> float:
        """Seconds until another request may come."""
        return max(self.requests.wait(), self.tokens.wait())


class KeyRing:
    """The keys of a file, read again when it changes; accounts of keys that stay as they are live on.

    Raises `KeyFileError` if the file cannot be read at the start. Later, the keys known before stay valid.
    """

    def __init__(self, path: Path):
        self._path = path
        self._stamp = path.stat().st_mtime_ns if path.exists() else 0
        self._accounts = [Account(key) for key in read_keys(path)]

    def find(self, secret: str) -> Account | None:
        """Whose key this is. The time it takes tells nothing of the keys there are."""
        self._reread()
        given, found = _hash(secret), None
        for account in self._accounts:
            if hmac.compare_digest(account.key.sha256, given):
                found = account
        return found

    def _reread(self) -> None:
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            self._stamp = stamp
            known = {account.key: account for account in self._accounts}
            self._accounts = [known.get(key) or Account(key) for key in read_keys(self._path)]
        except (OSError, KeyFileError):
            return
