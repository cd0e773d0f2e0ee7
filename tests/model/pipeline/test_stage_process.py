"""`listen` serves engines one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from soothsay import handshake
from soothsay.handshake import NONCE, Caller, call
from soothsay.model.pipeline import stage_process
from soothsay.model.pipeline.stage_process import MAX_WAITING, listen

KEY = b"k" * NONCE
LEAVE, END = b"leave", b"end"


class EndedError(Exception):
    """Ends `listen`, which otherwise never ends."""


@contextmanager
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Listen, and send back what engines send. Yields the port."""
    ports: SimpleQueue[int] = SimpleQueue()

    def serve(pipe: Connection) -> None:
        with pipe:
            try:
                while (data := pipe.recv_bytes()) not in (LEAVE, END):
                    pipe.send_bytes(data)
            except (EOFError, OSError):
                return
        if data == END:
            raise EndedError

    def run() -> None:
        with pytest.raises(EndedError):
            listen("127.0.0.1", 0, KEY, lambda _, port: ports.put(port))

    monkeypatch.setattr(stage_process, "serve_engine", serve)
    thread = threading.Thread(target=run)
    thread.start()
    port = ports.get(timeout=10)
    yield port
    with call("127.0.0.1", port, KEY) as last:
        last.send_bytes(END)
        thread.join(10)
    assert not thread.is_alive()


def answers(pipe: Connection) -> bool:
    pipe.send_bytes(b"x")
    return pipe.recv_bytes() == b"x"


def test_an_engine_waits_for_the_one_before_it_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with stage(monkeypatch) as port, call("127.0.0.1", port, KEY) as first:
        assert answers(first)
        monkeypatch.setattr(handshake, "PATIENCE", 0.2)
        with pytest.raises(TimeoutError):
            call("127.0.0.1", port, KEY)
        monkeypatch.setattr(handshake, "PATIENCE", 10.0)
        threading.Timer(0.1, first.send_bytes, [LEAVE]).start()
        with call("127.0.0.1", port, KEY) as second:  # the one that has given up does not keep it waiting
            assert answers(second)


def test_engines_that_have_given_up_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[handshake.Caller] = []
    admit = handshake.CallerGate.__init__

    def noted(gate: handshake.CallerGate, *args: object) -> None:
        *first, put = args
        admit(gate, *first, lambda caller: (waiting.append(caller), put(caller)))  # type: ignore

    monkeypatch.setattr(handshake.CallerGate, "__init__", noted)
    with stage(monkeypatch) as port, call("127.0.0.1", port, KEY) as first:
        assert answers(first)
        monkeypatch.setattr(handshake, "PATIENCE", 0.02)
        for _ in range(3 * MAX_WAITING):
            with pytest.raises(TimeoutError):
                call("127.0.0.1", port, KEY)
        end = time.monotonic() + 10
        while (count := sum(one.socket.fileno() >= 0 for one in waiting)) > MAX_WAITING:
            assert time.monotonic() < end, count
            time.sleep(0.01)
        assert len(waiting) > 2 * MAX_WAITING
        monkeypatch.setattr(handshake, "PATIENCE", 10.0)
        first.send_bytes(LEAVE)


def test_an_engine_that_is_gone_when_its_turn_comes_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, errors = Caller.answer, [ConnectionResetError()]

    def fail_once(caller: Caller) -> Connection:
        if errors:
            caller.socket.close()
            raise errors.pop()
        return answer(caller)

    monkeypatch.setattr(Caller, "answer", fail_once)
    with stage(monkeypatch) as port:
        with pytest.raises(OSError):
            call("127.0.0.1", port, KEY)
        with call("127.0.0.1", port, KEY) as second:
            assert answers(second)
            second.send_bytes(LEAVE)
