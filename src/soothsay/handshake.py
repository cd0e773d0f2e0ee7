"""How two processes on a network prove to each other that they have the same key, before they talk.

The server sends a nonce. The caller sends its own nonce, its name, and a proof: an HMAC-SHA256 over the word
"caller", both nonces and the name. The server's proof has the word "server". What follows is neither
encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
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
        self._unproven: dict[asyncio.Task[None], str] = {}  # by task, the oldest first: the caller's address
        self._log_at = 0.0  # when the log may have the next refusal
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="callers", daemon=True)

    def __enter__(self) -> Self:
        self._listening.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with self._listening, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stop.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        """Accept callers, until cancelled. Drops others if there are too many."""
        while True:
            try:
                sock, (address, *_) = await self._loop.sock_accept(self._listening)
            except OSError as error:  # there are too many files, or the caller is gone
                log.warning("caller not accepted", extra={"reason": str(error)})
                await asyncio.sleep(0.05)
                continue
            await asyncio.sleep(0)  # those whose proof has come pass first, since this one may push them out
            if len(self._unproven) >= CALLERS:
                ((crowded, _),) = Counter(self._unproven.values()).most_common(1)
                oldest = next(task for task, one in self._unproven.items() if one == crowded)
                del self._unproven[oldest]
                oldest.cancel()
                self._note_refusal(crowded, "there are too many callers")
            task = asyncio.create_task(self._meet(sock, address))
            self._unproven[task] = address
            task.add_done_callback(lambda done: self._unproven.pop(done, None))

    async def _meet(self, sock: socket.socket, address: str) -> None:
        """Admit a caller once it has proved that it has the key, or hang up."""
        nonce, told = secrets.token_bytes(NONCE), b""
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE):
                await self._loop.sock_sendall(sock, nonce)
                while left := NONCE + NAME + NONCE - len(told):
                    if not (part := await self._loop.sock_recv(sock, left)):
                        raise ConnectionError("the caller has hung up")
                    told += part
            theirs, name, proof = told[:NONCE], told[NONCE:-NONCE], told[-NONCE:]
            if not hmac.compare_digest(proof, _proof(self._key, b"caller", nonce, theirs, name)):
                raise ConnectionError("the caller does not have the key")
        except OSError as error:
            sock.close()
            late = isinstance(error, TimeoutError)
            reason = "it has not proved in time that it has the key" if late else str(error)
            self._note_refusal(address, reason)
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            sock.setblocking(True)
            self._admit(Caller(name, address, sock, _proof(self._key, b"server", nonce, theirs, name)))

    def _note_refusal(self, address: str, reason: str) -> None:
        if (now := time.monotonic()) >= self._log_at:
            log.warning("caller refused", extra={"address": address, "reason": reason})
            self._log_at = now + 1.0  # strangers must not fill the disk


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
