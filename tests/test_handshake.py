"""Two processes prove to each other that they have the same key, and strangers keep nobody waiting."""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from soothsay import handshake
from soothsay.handshake import ALIVE, CALLERS, NAME, NONCE, Caller, CallerGate, call

KEY = b"k" * NONCE
MINE, OTHER = b"m" * NAME, b"o" * NAME


@contextmanager
def gate() -> Iterator[tuple[int, SimpleQueue[Caller]]]:
    """A gate. Yields its port, and those that have passed."""
    passed: SimpleQueue[Caller] = SimpleQueue()
    listening = socket.create_server(("127.0.0.1", 0))
    with CallerGate(listening, KEY, passed.put):
        yield listening.getsockname()[1], passed
        while not passed.empty():
            passed.get().socket.close()


@contextmanager
def server(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """Does something with the first caller. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            with listening.accept()[0] as caller:
                act(caller)

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def connect(port: int, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10, source_address=(address, 0))


def receive(sock: socket.socket, size: int) -> bytes:
    """Some bytes; fewer if the other side hangs up."""
    data = b""
    try:
        while len(data) < size and (part := sock.recv(size - len(data))):
            data += part
    except ConnectionResetError:
        pass
    return data


def proof(side: bytes, server_nonce: bytes, caller_nonce: bytes, name: bytes, key: bytes = KEY) -> bytes:
    return hmac.digest(key, side + server_nonce + caller_nonce + name, "sha256")


def test_both_sides_send_what_the_protocol_says() -> None:
    ours = b"n" * NONCE
    with gate() as (port, passed), connect(port) as caller:
        theirs = receive(caller, NONCE)
        caller.sendall(ours + MINE + proof(b"caller", theirs, ours, MINE))
        admitted = passed.get(timeout=10)
        assert (admitted.name, admitted.address) == (MINE, "127.0.0.1")
        admitted.answer().close()
        assert receive(caller, NONCE) == proof(b"server", theirs, ours, MINE)

    def serve(sock: socket.socket) -> None:
        sock.sendall(ours)
        told = receive(sock, 2 * NONCE + NAME)
        theirs, name = told[:NONCE], told[NONCE:-NONCE]
        assert told[-NONCE:] == proof(b"caller", ours, theirs, name)
        sock.sendall(proof(b"server", ours, theirs, name))

    with server(serve) as port:
        call("127.0.0.1", port, KEY, MINE).close()


@pytest.mark.parametrize(
    "forged",
    [
        lambda theirs, ours: proof(b"server", theirs, ours, MINE),
        lambda theirs, ours: proof(b"caller", ours, theirs, MINE),
        lambda theirs, ours: proof(b"caller", theirs, ours, OTHER),
        lambda theirs, ours: proof(b"caller", bytes(NONCE), ours, MINE),
        lambda theirs, ours: proof(b"caller", theirs, ours, MINE, b"another key"),
        lambda theirs, ours: theirs,
        lambda theirs, ours: bytes(NONCE),
    ],
)
def test_a_caller_without_the_right_proof_is_refused(forged: Callable[[bytes, bytes], bytes]) -> None:
    ours = b"n" * NONCE
    with gate() as (port, passed), connect(port) as caller:
        caller.sendall(ours + MINE + forged(receive(caller, NONCE), ours))
        assert receive(caller, 1) == b""
        assert passed.empty()


@pytest.mark.parametrize(
    "forged",
    [
        lambda ours, told: told[-NONCE:],  # the caller's own proof
        lambda ours, told: proof(b"server", told[:NONCE], ours, MINE),
        lambda ours, told: proof(b"server", ours, told[:NONCE], OTHER),
        lambda ours, told: proof(b"server", ours, told[:NONCE], MINE, b"another key"),
        lambda ours, told: bytes(NONCE),
    ],
)
def test_a_server_without_the_right_proof_is_not_believed(forged: Callable[[bytes, bytes], bytes]) -> None:
    ours = b"n" * NONCE

    def serve(sock: socket.socket) -> None:
        sock.sendall(ours)
        sock.sendall(forged(ours, receive(sock, 2 * NONCE + NAME)))

    with server(serve) as port, pytest.raises(ConnectionError, match="key"):
        call("127.0.0.1", port, KEY, MINE)


def test_nobody_between_can_put_another_name_to_a_proof() -> None:
    with gate() as (onward, passed):

        def relay(caller: socket.socket) -> None:
            with connect(onward) as there:
                caller.sendall(receive(there, NONCE))
                told = receive(caller, 2 * NONCE + NAME)
                there.sendall(told[:NONCE] + OTHER + told[-NONCE:])
                assert receive(there, NONCE) == b""

        with server(relay) as port, pytest.raises(OSError):
            call("127.0.0.1", port, KEY, MINE)
        assert passed.empty()


def test_each_handshake_has_nonces_of_its_own() -> None:
    told = []

    def serve(sock: socket.socket) -> None:
        sock.sendall(b"n" * NONCE)
        told.append(receive(sock, 2 * NONCE + NAME))

    for _ in range(2):
        with server(serve) as port, pytest.raises(OSError):
            call("127.0.0.1", port, KEY, MINE)
    assert told[0][:NONCE] != told[1][:NONCE]
    with gate() as (port, _), connect(port) as first, connect(port) as second:
        assert receive(first, NONCE) != receive(second, NONCE)


def test_both_sides_notice_that_the_other_machine_is_gone() -> None:
    served: SimpleQueue[Connection] = SimpleQueue()
    with gate() as (port, passed):
        threading.Thread(target=lambda: served.put(passed.get(timeout=10).answer()), daemon=True).start()
        with call("127.0.0.1", port, KEY) as caller, served.get(timeout=10) as server:
            for end in (caller, server):
                with socket.socket(fileno=os.dup(end.fileno())) as same:
                    assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    for name, value in ALIVE.items():
                        if (option := getattr(socket, name, None)) is not None:
                            assert same.getsockopt(socket.IPPROTO_TCP, option) == value


def drip(sock: socket.socket) -> None:
    """Send a byte now and then, until the other side hangs up."""
    with suppress(OSError):
        for _ in range(60):  # fewer than the bytes of a handshake
            sock.sendall(b"x")
            time.sleep(0.02)
        raise AssertionError("it listens for ever")


def test_a_handshake_as_a_whole_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE", 0.2)
    monkeypatch.setattr(handshake, "PATIENCE", 0.2)
    with gate() as (port, passed):
        with connect(port) as caller, connect(port) as silent:
            drip(caller)
            assert len(receive(silent, 100)) == NONCE
        assert passed.empty()
    with server(drip) as port, pytest.raises(TimeoutError):
        call("127.0.0.1", port, KEY)


def test_a_part_of_a_proof_gives_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE", 0.2)
    ours = b"n" * NONCE

    def serve(sock: socket.socket) -> None:
        sock.sendall(ours)
        told = receive(sock, 2 * NONCE + NAME)
        right = proof(b"server", ours, told[:NONCE], MINE)
        for part, pause in ((right[:1], 0.15), (right[1:], 0.1)):
            time.sleep(pause)
            with suppress(OSError):  # the caller is gone
                sock.sendall(part)

    with server(serve) as port, pytest.raises(TimeoutError):
        call("127.0.0.1", port, KEY, MINE)


def test_callers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE", 100.0)
    with gate() as (port, passed), ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(2 * CALLERS)]
        for _ in range(3):
            threading.Thread(target=lambda: passed.get(timeout=10).answer().close(), daemon=True).start()
            call("127.0.0.1", port, KEY).close()
        assert len(receive(silent[0], 100)) <= NONCE  # it was dropped
        receive(silent[-1], NONCE)
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it was not
            silent[-1].recv(1)


def test_one_caller_too_many_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CALLERS", 2)
    with gate() as (port, _), ExitStack() as stack:
        callers = [stack.enter_context(connect(port)) for _ in range(2)]
        for caller in callers:
            receive(caller, NONCE)
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
        with connect(port) as third:
            receive(third, NONCE)  # so the first one has been dropped
            assert callers[0].recv(1) == b""
            with pytest.raises(BlockingIOError):
                callers[1].recv(1)


def test_many_callers_of_one_address_do_not_push_another_ones_out() -> None:
    ours = b"n" * NONCE
    with gate() as (port, passed), connect(port, "127.0.0.2") as slow, ExitStack() as stack:
        theirs = receive(slow, NONCE)
        for _ in range(2 * CALLERS):
            receive(stack.enter_context(connect(port)), NONCE)
        slow.sendall(ours + MINE + proof(b"caller", theirs, ours, MINE))
        passed_one = passed.get(timeout=10)
        assert passed_one.address == "127.0.0.2"
        passed_one.answer().close()


def test_a_gate_outlives_errors_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with gate() as (port, passed):
        failures = [OSError("too many open files"), ConnectionAbortedError()]
        accept = socket.socket.accept

        def failing(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", failing)
        threading.Thread(target=lambda: passed.get(timeout=10).answer().close(), daemon=True).start()
        call("127.0.0.1", port, KEY).close()
        assert not failures


def test_many_refusals_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with gate() as (port, _):
        for _ in range(20):
            with connect(port) as caller:
                caller.sendall(b"x" * 200)
                assert len(receive(caller, 100)) <= NONCE
    assert 1 <= caplog.text.count("caller refused") < 20


def test_the_end_of_a_gate_hangs_up() -> None:
    with gate() as (port, _):
        caller = connect(port)
        receive(caller, NONCE)
    with caller:
        assert receive(caller, 1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(port)
