"""How two processes on a network prove to each other that they have the same key, before they talk.

The server sends a nonce. The caller sends its own nonce, its name, and a proof: an HMAC-SHA256 over the word
"caller", both nonces and the name. The server's proof has the word "server". What follows is neither
encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import NamedTuple, Self

log = logging.getLogger("soothsay.handshake")

HANDSHAKE = 5.0
"""Seconds in which a caller must prove that it has the key, from its first byte to the last one."""

PATIENCE = 10.0
"""Seconds in which the other side must answer a caller. It may serve another one first."""

CALLERS = 64
"""Limit of callers that have proved nothing yet. Beyond it, the oldest one is dropped of the address that has
most of them."""

NONCE = 32
"""Bytes of a challenge, and of a proof."""

NAME = 16
"""Bytes of a caller's name."""

ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""When a silent machine counts as dead: after a minute. Not every system can be told."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A process that has called and has the key. It waits for the proof that this side has it too."""

    name: bytes
    address: str
    socket: socket.socket
    proof: bytes

    def answer(self) -> Connection:
        """Send the proof, and connect. Raises `OSError` if the caller is gone."""
        with self.socket:  # a connection has taken the socket over, so this closes it only if there is none
            self.socket.sendall(self.proof)
            return _connection(self.socket)


class CallerGate:
    """Listens for callers, and lets those pass that prove that they have a key. A context manager.

    One thread reads from all callers at once, so those without the key keep nobody waiting. Each has
    `HANDSHAKE` seconds in all.

    Args:
        listening: the socket. It is closed at the end.
        key: that callers must have.
        admit: is called with each one that has it, in the thread. It must not block.
    """

    def __init__(self, listening: socket.socket, key: bytes, admit: Callable[[Caller], None]):
        self._listening, self._key, self._admit = listening, key, admit
        self._unproven: dict[socket.socket, _Unproven] = {}  # the oldest first
        self._log_at = 0.0  # when the log may have the next refusal
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="callers", daemon=True)

    def __enter__(self) -> Self:
        self._listening.setblocking(False)
        for sock in (self._listening, self._stopped):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.close()
        self._thread.join()

    def _run(self) -> None:
        with self._listening, self._stopped, self._selector:
            while True:
                due = next((one.due for one in self._unproven.values()), None)
                events = self._selector.select(None if due is None else max(due - time.monotonic(), 0))
                ready = {key.fileobj for key, _ in events}
                if self._stopped in ready:
                    break
                for one in [one for one in self._unproven.values() if one.socket in ready]:
                    self._read(one)  # before others are accepted, since these may push it out
                now = time.monotonic()
                for one in [one for one in self._unproven.values() if one.due <= now]:
                    self._refuse(one, "it has not proved in time that it has the key")
                if self._listening in ready:
                    self._accept()
            for one in [*self._unproven.values()]:
                self._forget(one).close()

    def _accept(self) -> None:
        """Accept a caller. Drops another one if there are too many."""
        if len(self._unproven) >= CALLERS:
            ((address, _),) = Counter(one.address for one in self._unproven.values()).most_common(1)
            oldest = next(one for one in self._unproven.values() if one.address == address)
            self._refuse(oldest, "there are too many callers")
        try:
            sock, (address, *_) = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # there are too many files, or the caller is gone
            log.warning("caller not accepted", extra={"reason": str(error)})
            time.sleep(0.05)
            return
        caller = _Unproven(sock, address, time.monotonic() + HANDSHAKE, secrets.token_bytes(NONCE))
        sock.setblocking(False)
        self._unproven[sock] = caller
        self._selector.register(sock, selectors.EVENT_READ)
        with suppress(OSError):  # of one that is gone; reading will show it
            sock.send(caller.nonce)

    def _read(self, unproven: _Unproven) -> None:
        """Read from a caller. Once it has sent everything, admit it or refuse it."""
        try:
            caller = unproven.read(self._key)
        except OSError as error:
            self._refuse(unproven, str(error))
            return
        if caller is not None:
            self._forget(unproven).setblocking(True)
            self._admit(caller)

    def _refuse(self, unproven: _Unproven, reason: str) -> None:
        self._forget(unproven).close()
        if (now := time.monotonic()) >= self._log_at:
            log.warning("caller refused", extra={"address": unproven.address, "reason": reason})
            self._log_at = now + 1.0  # strangers must not fill the disk

    def _forget(self, unproven: _Unproven) -> socket.socket:
        del self._unproven[unproven.socket]
        self._selector.unregister(unproven.socket)
        return unproven.socket


@dataclass(slots=True)
class _Unproven:
    """A caller that has not proved yet that it has the key."""

    socket: socket.socket
    address: str
    due: float
    nonce: bytes
    received: bytes = b""

    def read(self, key: bytes) -> Caller | None:
        """Read on. Returns the caller once it has proved that it has the key. Raises `OSError`."""
        size = NONCE + NAME + NONCE - len(self.received)
        try:
            part = self.socket.recv(size)
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("the caller has hung up")
        self.received += part
        if len(part) < size:
            return None
        theirs, name, proof = self.received[:NONCE], self.received[NONCE:-NONCE], self.received[-NONCE:]
        if not hmac.compare_digest(proof, _proof(key, b"caller", self.nonce, theirs, name)):
            raise ConnectionError("the caller does not have the key")
        return Caller(name, self.address, self.socket, _proof(key, b"server", self.nonce, theirs, name))


class Number(NamedTuple):
    """What a caller needs, as `call` takes it: the address, the key, and the caller's own name."""

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


def call(host: str, port: int, key: bytes, name: bytes = bytes(NAME)) -> Connection:
    """Call a process that has a `CallerGate`. Raises `OSError` if it does not answer, or lacks the key."""
    with socket.create_connection((host, port), timeout=PATIENCE) as caller:
        due = time.monotonic() + PATIENCE
        theirs, ours = _receive(caller, NONCE, due), secrets.token_bytes(NONCE)
        caller.sendall(ours + name + _proof(key, b"caller", theirs, ours, name))
        proof = _receive(caller, NONCE, due)
        if not hmac.compare_digest(proof, _proof(key, b"server", theirs, ours, name)):
            raise ConnectionError("the other side does not have the key")
        return _connection(caller)


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


def _receive(sock: socket.socket, size: int, due: float) -> bytes:
    """Receive some bytes before a time. Raises `OSError`."""
    data = b""
    while len(data) < size:
        if (left := due - time.monotonic()) <= 0:
            raise TimeoutError("the other side has not answered in time")
        sock.settimeout(left)
        if not (part := sock.recv(size - len(data))):
            raise ConnectionError("the other side has hung up")
        data += part
    return data


def _connection(sock: socket.socket) -> Connection:
    """A connection for messages, which are small and must not wait for each other. It has the socket."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(sock.detach())
