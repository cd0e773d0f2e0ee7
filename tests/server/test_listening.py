"""A port is bound before the model is loaded, and one that cannot be had is an error that says why."""

from __future__ import annotations

import gc
import socket
from contextlib import AbstractContextManager

import pytest
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.errors import SoothsayError
from soothsay.server.runner import bind


def test_a_bound_port_is_taken_and_refuses_clients() -> None:
    with bind("127.0.0.1", 0) as (bound,):
        port = bound.getsockname()[1]
        bound.listen()  # until then, a second program may bind it too
        with (
            pytest.raises(SoothsayError, match=f"port {port} of 127.0.0.1 .*another with --port"),
            again(port),
        ):
            pass
    with again(port):  # the socket was closed
        pass


def again(port: int) -> AbstractContextManager[list[socket.socket]]:
    return bind("127.0.0.1", port)


def test_a_name_may_have_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, ("127.0.0.1", 0)), (*kind, ("127.0.0.2", 0)), (*kind, ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bind("both", 0) as both:
        assert [one.getsockname()[0] for one in both] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "does not have that address"),
        ("no-such-host.invalid", "has no address"),
    ],
)
def test_an_address_of_another_machine_is_refused(host: str, words: str) -> None:
    with pytest.raises(SoothsayError, match=words), bind(host, 0):
        pass


def test_the_command_closes_its_sockets_if_the_model_cannot_be_loaded() -> None:
    told = CliRunner().invoke(app, ["serve", "/no/such/model", "--port", "0"])
    assert told.exit_code == 2
    del told
    gc.collect()  # a socket that is open would be a warning now, which is an error


def test_the_command_says_so_before_it_loads_a_model() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = CliRunner().invoke(app, ["serve", "/no/such/model", "--port", str(port)])
    assert told.exit_code == 2
    assert "another program has it" in told.output
    assert "/no/such/model" not in told.output
