"""`bench busy`: the figures follow from how servers answer beside busy processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner
from virtual import BETWEEN, Fake, next_run

from soothsay.bench import busy
from soothsay.bench.busy import busy_processes
from soothsay.cli.app import app


def test_share_and_longest_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One server takes twice as long beside a process and thrice beside two, the other is not slowed."""
    slowed, steady = Fake(usage={"completion_tokens": 8}), Fake(between=BETWEEN / 2)

    @contextmanager
    def slow(count: int) -> Iterator[None]:
        slowed.between = BETWEEN * (1 + count)
        yield
        slowed.between = BETWEEN

    monkeypatch.setattr(busy, "busy_processes", slow)
    out = tmp_path / "busy.json"
    with next_run(slowed, steady):
        command = ["bench", "busy", f"a={slowed.url}", f"b={steady.url}", "--json", str(out), "-n", "8"]
        result = CliRunner().invoke(
            app, [*command, "--rounds", "2", "--loops", "2", "--loops", "1", "--loops", "1"]
        )
    assert result.exit_code == 0, result.output
    rows = {(row["server"], row["loops"]): row for row in json.loads(out.read_text())}
    assert {place: row["share"] for place, row in rows.items()} == pytest.approx(
        {("a", 0): 1, ("b", 0): 1, ("a", 1): 1 / 2, ("b", 1): 1, ("a", 2): 1 / 3, ("b", 2): 1}
    )
    assert rows["a", 0]["rate"] == pytest.approx(2 / BETWEEN)  # two tokens a piece
    assert rows["b", 0]["rate"] == pytest.approx(2 / BETWEEN)  # its own count is pieces, in half the time
    assert rows["a", 2]["longest"] == pytest.approx(1)
    assert [body["max_tokens"] for body in slowed.bodies] == [8] * 7  # the first is not counted


def test_longest_wait_in_medians() -> None:
    waits = [1.0, 1.0, 4.0, 1.0]
    assert busy._rates([sum(waits[:i]) for i in range(5)], tokens=10) == busy.Stream(rate=8 / 7, longest=4.0)


def test_servers_that_cannot_be_measured() -> None:
    with next_run(fake := Fake(pieces=["all at once"])):
        result = CliRunner().invoke(app, ["bench", "busy", fake.url])
    assert result.exit_code == 2
    assert "in 1 piece; at least 3 are needed" in result.stderr.replace("\n", " ")
    result = CliRunner().invoke(app, ["bench", "busy", "http://127.0.0.1:1", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "names of their own" in result.stderr


def test_busy_processes_compute_and_end() -> None:
    before = os.times()
    with busy_processes(2):
        time.sleep(0.2)
    after = os.times()
    assert after.children_user + after.children_system > before.children_user + before.children_system
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_busy_processes_end_with_a_benchmark_that_is_killed() -> None:
    code = "import os, time; from soothsay.bench.busy import busy_processes as busy\nwith busy(1): "
    code += "time.sleep(0.3); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        killed.communicate(timeout=60)  # the pipe ends when all who have it have ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
