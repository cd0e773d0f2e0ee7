"""Who may call the port for engines, and what happens to others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from soothsay.handshake import NAME, NONCE, Switchboard, call


@pytest.fixture
def board() -> Iterator[Switchboard]:
    with Switchboard("127.0.0.1") as one:
        yield one


def test_callers_reach_whoever_expects_them_and_messages_go_both_ways(board: Switchboard) -> None:
    numbers = [board.expect() for _ in range(3)]
    theirs = [call(*number) for number in reversed(numbers)][::-1]
    for i, (number, caller) in enumerate(zip(numbers, theirs, strict=True)):
        ours = board.answer(number, 5)
        assert ours is not None
        caller.send(("hello", i))
        assert ours.recv() == ("hello", i)
        ours.send(b"x" * 1_000_000)
        assert len(caller.recv()) == 1_000_000
        ours.close()
        with pytest.raises(EOFError):
            caller.recv()
        caller.close()
        board.forget(number)
        assert board.answer(number, 0.01) is None


def test_a_caller_without_the_key_is_refused(board: Switchboard) -> None:
    number = board.expect()
    with pytest.raises(OSError):
        call(*number._replace(key=b"x" * NONCE))
    assert board.answer(number, 0.1) is None
    unknown = number._replace(name=b"y" * NAME)
    with pytest.raises((OSError, EOFError)):
        call(*unknown).recv()
    caller = call(*number)
    assert board.answer(number, 5) is not None
    caller.close()


def test_a_caller_that_is_expected_no_more_is_hung_up_on(board: Switchboard) -> None:
    """Its engine has ended meanwhile. It must end too, since it holds cores of the cluster."""
    number = board.expect()
    board.forget(number)
    with pytest.raises(OSError):
        call(*number).close()
