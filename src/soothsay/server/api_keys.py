"""API keys and their limits. A file holds hashes of the keys; a key itself is shown once, when it is made.

A key has 256 random bits, so one round of SHA-256 protects it as well as a slow hash.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from soothsay.errors import SoothsayError
from soothsay.files import write_json


class KeyFileError(SoothsayError):
    """A file of API keys cannot be read or changed."""


@dataclass(frozen=True)
class Key:
    """One API key, without the secret itself."""

    name: str
    sha256: str  # of the secret, hexadecimal
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # of prompts and answers; None: no limit


def read_keys(path: Path) -> list[Key]:
    """Read the keys of a file. Raises `KeyFileError`."""
    try:
        return [Key(**entry) for entry in json.loads(path.read_text())["keys"]]
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read ({error.strerror}); make it: soothsay keys add") from None
    except (ValueError, TypeError, KeyError):
        raise KeyFileError(f"{path} is not a file of API keys; make one: soothsay keys add") from None


def add_key(
    path: Path, name: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
) -> str:
    """Make a key, add it to a file, and return its secret. Creates the file. Raises `KeyFileError`."""
    keys = read_keys(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise KeyFileError(f"{path} has a key named {name!r}; remove it first, or choose another name")
    secret = f"sk-{secrets.token_urlsafe(32)}"
    _write(path, [*keys, Key(name, _hash(secret), requests_per_minute, tokens_per_minute)])
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file. Raises `KeyFileError` if it is not there."""
    keys = read_keys(path)
    if all(key.name != name for key in keys):
        raise KeyFileError(f"{path} has no key named {name!r}")
    _write(path, [key for key in keys if key.name != name])


def _write(path: Path, keys: list[Key]) -> None:
    """Write a file that only its owner can read."""
    write_json(path, {"keys": [asdict(key) for key in keys]}, indent=2, mode=0o600)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


class Allowance:
    """A budget that refills at a constant rate, up to one minute's worth.

    A charge may exceed what is left, because the length of an answer is known only at its end. The budget is
    then negative, and nothing can be had until it has refilled.

    Args:
        per_minute: amount that refills in a minute; None: no limit.
        clock: seconds, from any starting point.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic):
        self._rate = None if per_minute is None else per_minute / 60
        self._most = float(per_minute or 0)
        self._clock = clock
        self._left, self._at = self._most, clock()

    def wait(self, least: float = 1.0) -> float:
        """Seconds until `least` is available; 0: it is available now."""
        if self._rate is None:
            return 0.0
        self._refill()
        missing = min(least, self._most) - self._left
        return max(missing / self._rate, 0.0) if self._rate else 60.0

    def charge(self, amount: float) -> None:
        """Take an amount. What is left may become negative."""
        if self._rate is not None:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * (self._rate or 0.0), self._most)
        self._at = now


class Account:
    """A key, and what it has left of its limits."""

    def __init__(self, key: Key):
        self.key = key
        self.requests = Allowance(key.requests_per_minute)
        self.tokens = Allowance(key.tokens_per_minute)

    def wait(self) -> float:
        """Seconds until another request is allowed."""
        return max(self.requests.wait(), self.tokens.wait())


class KeyRing:
    """The keys of a file. Reads the file again when it changes; unchanged keys keep their accounts.

    Raises `KeyFileError` if the file cannot be read at first. If that happens later, the old keys stay valid.
    """

    def __init__(self, path: Path):
        self._path = path
        self._stamp = path.stat().st_mtime_ns if path.exists() else 0
        self._accounts = [Account(key) for key in read_keys(path)]

    def find(self, secret: str) -> Account | None:
        """The account of a key, or None. Takes the same time whether a key is nearly right or wrong."""
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
