"""How two processes on a network prove to each other that they have the same key, before they talk.

Each sends a nonce, and an HMAC-SHA256 over both nonces. What follows is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from multiprocessing.connection import Connection

HANDSHAKE = 10.0
"""Seconds in which the other side must prove that it has the key."""

NONCE = 32
"""Bytes of a challenge, and of a proof."""

NAME = 16
"""Bytes of a caller's name."""


def admit(caller: socket.socket, key: bytes) -> tuple[bytes, Connection]:
    """The name of a caller that has the key, and the connection, which takes the socket over.

    Raises `OSError` if it does not have the key, or does not say so in time.
    """
    bound(caller, HANDSHAKE)
    ours = secrets.token_bytes(NONCE)
    caller.sendall(ours)
    theirs, name, proof = (_receive(caller, size) for size in (NONCE, NAME, NONCE))
    if not hmac.compare_digest(proof, _proof(key, b"caller", ours, theirs, name)):
        raise ConnectionError("the caller does not have the key")
    caller.sendall(_proof(key, b"server", ours, theirs, name))
    return name, _connection(caller)


def call(host: str, port: int, key: bytes, name: bytes = bytes(NAME)) -> Connection:
    """Call a process that `admit`s callers. Raises `OSError` if it does not answer, or lacks the key."""
    caller = socket.create_connection((host, port), timeout=HANDSHAKE)
    with caller:  # a connection has taken the socket over, so this closes it only if there is none
        bound(caller, HANDSHAKE)
        theirs, ours = _receive(caller, NONCE), secrets.token_bytes(NONCE)
        caller.sendall(ours + name + _proof(key, b"caller", theirs, ours, name))
        proof = _receive(caller, NONCE)
        if not hmac.compare_digest(proof, _proof(key, b"server", theirs, ours, name)):
            raise ConnectionError("the other side does not have the key")
        return _connection(caller)


def bound(sock: socket.socket, seconds: float) -> None:
    """Block for at most some seconds in each call; 0: for any time. Python's own timeouts do not last."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise ConnectionError("the other side has hung up")
        data += part
    return data


def _connection(sock: socket.socket) -> Connection:
    """A connection for messages, which are small and must not wait for each other."""
    bound(sock, 0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(sock.detach())
