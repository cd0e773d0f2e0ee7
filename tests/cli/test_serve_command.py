"""What `soothsay serve` says at start, and how `batch` finds its model and files."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from soothsay import LLM
from soothsay.cli.app import app
from soothsay.cli.serve_command import _address, _request, cors_origins
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


def test_two_models_are_one_too_many() -> None:
    for command in ("chat a --model b", "serve a --model b", "verify a -m b", "batch a in out -m b"):
        result = CliRunner().invoke(app, command.split())
        assert (result.exit_code, result.stderr) == (
            2,
            "error: give one model: MODEL is 'a', but --model is 'b'\n",
        )
