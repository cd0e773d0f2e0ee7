"""A port that engines on other machines call. Each caller proves that it has the key, and says who it is."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Self

from soothsay import handshake
from soothsay.handshake import CALLERS, NAME, NONCE, Caller, CallerGate
from soothsay.server.http.json_log import log


@dataclass(frozen=True, slots=True)
class Number:
    """What a caller needs: the address, its own name, and the key."""

    host: str
    port: int
    key: bytes
    name: bytes


class Switchboard:
    """Accepts connections of engines and hands each to whoever expects it. A context manager.

    Messages are pickles, so nothing of a caller is read as a message before it has proved that it has the
    key, and the caller reads nothing before the switchboard has proved the same (HMAC-SHA256 over both sides'
    nonces). The connection is not encrypted.

    Args:
        host: the address to listen on, by which engines reach this machine.
    """

    def __init__(self, host: str):
        self._host, self._key = host, secrets.token_bytes(NONCE)
        self._expected: dict[bytes, SimpleQueue[Connection]] = {}

    def __enter__(self) -> Self:
        listening = socket.create_server((self._host, 0), backlog=CALLERS)
        self._port = listening.getsockname()[1]
        self._gate = CallerGate(listening, self._key, self._connect).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._gate.__exit__(*error)

    def expect(self) -> Number:
        """The number for one more caller."""
        name = secrets.token_bytes(NAME)
        self._expected[name] = SimpleQueue()
        return Number(self._host, self._port, self._key, name)

    def answer(self, number: Number, seconds: float) -> Connection | None:
        """The connection of a caller; None if it has not called within some seconds, or is not expected."""
        with suppress(Empty, KeyError):
            return self._expected[number.name].get(timeout=seconds)
        return None

    def forget(self, number: Number) -> None:
        """Expect a caller no more."""
        self._expected.pop(number.name, None)

    def _connect(self, caller: Caller) -> None:
        """Give the connection of a caller to whoever expects it."""
        with caller.socket, suppress(OSError):
            if (expecting := self._expected.get(caller.name)) is None:
                log.warning("caller not expected", extra={"address": caller.address})
            else:
                expecting.put(caller.answer())


def call(number: Number) -> Connection:
    """Call a switchboard. Raises `OSError` if it does not answer, or does not have the key."""
    return handshake.call(number.host, number.port, number.key, number.name)
