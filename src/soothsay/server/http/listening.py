"""The sockets that a server listens on. They are bound before a model is loaded, which may take minutes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from soothsay.errors import SoothsayError

HINTS = {
    errno.EADDRINUSE: "another program has it; stop that one, or choose another with --port",
    errno.EADDRNOTAVAIL: "this machine does not have that address; --host 0.0.0.0 means all that it has",
    errno.EACCES: "this user may not have it; choose one from 1024 on with --port",
}
"""What to do, by the error that the system reports."""


@contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind a port of this machine. Clients are refused until somebody listens on the sockets.

    The sockets are closed at the end.

    Args:
        host: an address or a name. A name may have several addresses; each has a socket.
        port: the port; 0: any free port, which may be another one for each address.

    Raises `SoothsayError` if the port or the address is not to be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SoothsayError(f"the host {host!r} has no address ({error}); check --host") from None
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                sockets.append(bound := stack.enter_context(socket.socket(family, kind, protocol)))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind(address)
        except OSError as error:
            hint = HINTS.get(error.errno or 0, os.strerror(error.errno or 0))
            raise SoothsayError(f"port {port} of {host} cannot be used: {hint}") from None
        yield sockets
