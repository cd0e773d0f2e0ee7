"""A port that engines on other machines call. Each caller proves that it has the key, and says who it is."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Self

log = logging.getLogger("soothsay.server")

HANDSHAKE = 10.0
"""Seconds in which a caller must prove that it has the key."""

CALLERS = 64
"""Limit of callers that have not proved it yet."""

NONCE = 32
"""Bytes of a challenge, and of a proof."""

NAME = 16
"""Bytes of a caller's name."""


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
        self._callers = threading.Semaphore(CALLERS)

    def __enter__(self) -> Self:
        self._listening = socket.create_server((self._host, 0), backlog=CALLERS)
        threading.Thread(target=self._accept, name="switchboard", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listening.close()

    def expect(self) -> Number:
        """The number for one more caller."""
        name = secrets.token_bytes(NAME)
        self._expected[name] = SimpleQueue()
        return Number(self._host, self._listening.getsockname()[1], self._key, name)

    def answer(self, number: Number, seconds: float) -> Connection | None:
        """The connection of a caller; None if it has not called within some seconds, or is not expected."""
        with suppress(Empty, KeyError):
            return self._expected[number.name].get(timeout=seconds)
        return None

    def forget(self, number: Number) -> None:
        """Expect a caller no more."""
        self._expected.pop(number.name, None)

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                caller, _ = self._listening.accept()
                if self._callers.acquire(blocking=False):
                    threading.Thread(target=self._admit, args=(caller,), daemon=True).start()
                else:
                    caller.close()

    def _admit(self, caller: socket.socket) -> None:
        try:
            _bound(caller, HANDSHAKE)
            ours = secrets.token_bytes(NONCE)
            caller.sendall(ours)
            theirs, name, proof = (_receive(caller, size) for size in (NONCE, NAME, NONCE))
            if not hmac.compare_digest(proof, _proof(self._key, b"caller", ours, theirs, name)):
                raise ConnectionError("the caller does not have the key")
            caller.sendall(_proof(self._key, b"server", ours, theirs, name))
            self._expected[name].put(_connection(caller))
        except (OSError, KeyError) as error:
            log.warning("caller refused", extra={"reason": str(error)})
            caller.close()
        finally:
            self._callers.release()


def call(number: Number) -> Connection:
    """Call a switchboard. Raises `OSError` if it does not answer, or does not have the key."""
    caller = socket.create_connection((number.host, number.port), timeout=HANDSHAKE)
    with caller:  # a connection has taken the socket over, so this closes it only if there is none
        _bound(caller, HANDSHAKE)
        theirs, ours = _receive(caller, NONCE), secrets.token_bytes(NONCE)
        caller.sendall(ours + number.name + _proof(number.key, b"caller", theirs, ours, number.name))
        proof = _receive(caller, NONCE)
        if not hmac.compare_digest(proof, _proof(number.key, b"server", theirs, ours, number.name)):
            raise ConnectionError("the switchboard does not have the key")
        return _connection(caller)


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise ConnectionError("the other side has hung up")
        data += part
    return data


def _bound(sock: socket.socket, seconds: float) -> None:
    """Block for at most some seconds in each call; 0: for any time. Python's own timeouts do not last."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _connection(sock: socket.socket) -> Connection:
    """A connection for messages, which are small and must not wait for each other."""
    _bound(sock, 0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(sock.detach())
