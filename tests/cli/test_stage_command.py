"""`soothsay stage` and `soothsay serve --stage`: a model in two processes, from the command line."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from commands import Command
from serving import command
from typer.testing import CliRunner, Result

from soothsay import LLM, SamplingParams
from soothsay.cli.app import app
from soothsay.model.pipeline import stage_process


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file with a key."""
    file = tmp_path / "key"
    file.write_text(secrets.token_urlsafe(32))
    return file


@contextmanager
def stage(key: Path, log: Path) -> Iterator[tuple[str, Command]]:
    """Run the command. Yields its address, and the process."""
    process = Command("stage", "127.0.0.1:0", "--key", str(key), log=log)
    try:
        while (found := re.search(r"waiting for engines at (\S+)\n", log.read_text())) is None:
            assert not process.ended, log.read_text()
            time.sleep(0.01)
        yield found[1], process
    finally:
        process.send(signal.SIGKILL)
        process.finish()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_server_whose_layers_run_in_another_process(tmp_path: Path, key: Path) -> None:
    meant = (
        LLM("sibyl", dtype="int8", drafter="none")
        .generate("A man", SamplingParams(temperature=0, max_tokens=12))
        .text
    )
    body = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 12}
    with stage(key, tmp_path / "stage log") as (address, process), ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        for sent in (b"", b"x") * 40:  # strangers, who stay
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(sent)
        with command(tmp_path / "log", "--stage", address, "--stage-key", str(key)) as url:
            assert httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"] == meant
        process.send(signal.SIGINT)
        printed = process.finish(20)[2]
    assert "Traceback" not in printed


def test_addresses(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(stage_process, "listen", lambda host, port, *_: found.append((host, port)))
    for text in ("[::1]:65535", "here:0"):
        assert run("stage", text, "--key", str(key)).exit_code == 0
    assert found == [("::1", 65535), ("here", 0)]
    for text in ("here:65536", "here:-1", "here:", ":80", "here"):
        assert f"'{text}' is not HOST:PORT" in run("stage", text, "--key", str(key)).stderr
    assert len(found) == 2


def test_refusals(tmp_path: Path, key: Path) -> None:
    short = tmp_path / "short"
    short.write_text("abc")
    assert "needs --stage-key FILE" in run("serve", "sibyl", "--stage", "127.0.0.1:1").stderr
    two = run("serve", "sibyl", "--stage", "127.0.0.1:1", "--stage-key", str(key), "--replicas", "2")
    assert "--stage serves one engine" in two.stderr
    assert "at least" in run("stage", "127.0.0.1:0", "--key", str(short)).stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("stage", address, "--key", str(key))
    assert result.exit_code == 2
    assert f"cannot listen at {address}" in result.stderr
