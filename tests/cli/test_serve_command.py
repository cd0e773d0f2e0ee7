"""What `soothsay serve` says at start, and how `batch` finds its model and files."""

from __future__ import annotations

import os
import shlex
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from soothsay import LLM
from soothsay.cli.app import app
from soothsay.cli.serve_command import Serve, _address, _request, cors_origins
from soothsay.errors import SoothsayError
from soothsay.server.batch.batch_run import BatchSummary


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_the_address_can_be_reached_from_here(host: str, address: str) -> None:
    assert _address(host, 80) == address


@pytest.mark.parametrize(("pid", "handler"), [(1, signal.default_int_handler), (2, signal.SIG_DFL)])
def test_the_first_process_of_a_container_can_be_ended_while_it_loads(
    pid: int, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ignore a signal that has no handler. `main` has set one."""
    handlers = list[Any]()

    def bind(*_: Any) -> Any:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise SoothsayError("enough")

    monkeypatch.setattr("soothsay.server.runner.bind", bind)
    monkeypatch.setattr(os, "getpid", lambda: pid)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert CliRunner().invoke(app, ["serve", "sibyl"]).exit_code == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [handler]


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [(True, "Warning: everyone who can reach 0.0.0.0 can use it"), (False, "everyone who can reach 0.0.0.0")],
)
def test_a_server_without_keys_warns_in_the_log_or_on_a_terminal(
    is_terminal: bool, expected: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    serve: Any = SimpleNamespace(
        engine=SimpleNamespace(learn=0), host="0.0.0.0", cors_origin=None, learn_for_tenants=False
    )
    console = Console(stderr=True, force_terminal=is_terminal, soft_wrap=True, highlight=False)
    Serve._warn(serve, console, keyless=True)
    lines = [capfd.readouterr().err] if is_terminal else [record.message for record in caplog.records]
    assert [line.startswith(expected) for line in lines] == [True]


def test_the_request_has_the_place_of_a_key() -> None:
    tokenizer: Any = SimpleNamespace(has_chat_template=True)
    base: Any = SimpleNamespace(has_chat_template=False)
    chat = shlex.split(_request("http://a", tokenizer, keyless=False))
    assert chat[:4] == ["curl", "http://a/v1/chat/completions", "-H", "Authorization: Bearer KEY"]
    assert chat[-2:] == ["-d", '{"messages": [{"role": "user", "content": "Hello!"}]}']
    assert shlex.split(_request("http://a", base, keyless=True))[-1] == '{"prompt": "Once upon a time"}'
    assert shlex.split(_request("http://a", None, keyless=True))[-1] == '{"prompt": [0]}'


def test_what_a_model_says_of_itself() -> None:
    about = LLM("sibyl", kv_memory="32MiB", max_requests=1, dtype="int8").about()
    assert about["dtype"].startswith("int8 weights, ")
    assert about["kv_cache"].startswith("0.03 GiB for ")
    assert about["drafter"].startswith("auto: suffix")
    assert int(about["threads"]) >= 1


def test_origins_are_as_browsers_send_them() -> None:
    given = ("https://App.Example.com", "http://localhost:3000", "http://[::1]:80", "*")
    assert cors_origins(given) == ("https://app.example.com", *given[1:])


@pytest.mark.parametrize(
    "given", ["sibyl in out", "--model sibyl in out", "sibyl in out -m sibyl", "in out -m sibyl"]
)
def test_batch_takes_the_model_in_its_place_or_by_name(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[tuple[str, ...]]()

    def run(*places: str, **_: Any) -> Any:
        called.append(places)
        return BatchSummary(lines=0, failed=0, earlier=0, tokens=0)

    monkeypatch.setattr("soothsay.server.batch.batch_run.run_batch", run)
    result = CliRunner().invoke(app, ["batch", *given.split()])
    assert result.exit_code == 0, result.output
    assert called == [("sibyl", "in", "out")]


@pytest.mark.parametrize("command", [["serve", "sibyl"], ["batch", "sibyl", "in", "out"]])
def test_windows_is_told_what_to_do(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "pthread_sigmask")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "run them in WSL or on Linux" in result.stderr


def test_two_models_are_one_too_many() -> None:
    for command in ("chat a --model b", "serve a --model b", "verify a -m b", "batch a in out -m b"):
        result = CliRunner().invoke(app, command.split())
        assert (result.exit_code, result.stderr) == (
            2,
            "Error: give one model: MODEL is 'a', but --model is 'b'\n",
        )
