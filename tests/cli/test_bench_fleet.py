"""`soothsay bench fleet` from the command line, with times from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from soothsay.bench.fleet.step_times import StepTimes
from soothsay.bench.fleet.trace import MAX_LINE
from soothsay.cli.app import app
from soothsay.model.pass_times import PassTimes

LINE = json.dumps({"session": "a", "arrival": 1, "prompt": [["x", 41]], "answer": ["y", 3]})


@pytest.fixture
def times(tmp_path: Path) -> str:
    """A file of times: n answers take 0.9 + 0.1 n seconds, and m rows of prompts 0.9 + 0.1 m."""
    decoding, reading = PassTimes([1, 11], [1], [[1.0, 2.0]]), PassTimes([1, 101], [1], [[1.0, 11.0]])
    StepTimes(decoding, decoding, reading).save(tmp_path / "times.json")
    return str(tmp_path / "times.json")


def run(*args: str) -> Result:
    """Run the command. Lines are wide, so that no message is wrapped."""
    return CliRunner().invoke(app, ["bench", "fleet", *args], env={"COLUMNS": "300"})


def test_a_trace_is_simulated(times: str, tmp_path: Path) -> None:
    """A prompt of 41 tokens takes 5 s and brings a token; two more take 1 s each."""
    trace, numbers = tmp_path / "trace.jsonl", tmp_path / "numbers.json"
    trace.write_text(LINE + "\n")
    result = run("--times", times, "--trace", str(trace), "--replicas", "1,2", "--json", str(numbers))
    assert result.exit_code == 0, result.stderr
    for heading in ("engines", "tokens/s", "first token, s", "p99, s", "cached"):
        assert heading in result.stdout
    for rule in ("router", "least load", "round robin"):
        assert sum(rule in line and "5.000" in line for line in result.stdout.splitlines()) == 2
    rows = json.loads(numbers.read_text())
    assert [row["replicas"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert all(row["throughput"] == pytest.approx(3 / 7) for row in rows)


def test_a_chart_is_drawn(times: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "fleet.png"
    args = ("--sessions", "2", "--turns", "2", "--replicas", "1,2", "--png", str(png))
    result = run("--times", times, *args)
    assert result.exit_code == 0, result.stderr
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--replicas", "0"], "--replicas 0: give numbers from 1 to 4096"),
        (["--replicas", "1,x"], "--replicas 1,x: give numbers from 1 to 4096"),
        (["--acceptance", "3", "--tree", "2"], "--acceptance cannot be above --tree"),
        (["sibyl"], "give a model to measure, or --times FILE"),
    ],
)
def test_an_impossible_option_is_named(args: list[str], message: str, times: str) -> None:
    result = run("--times", times, *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "[",
        json.dumps({**json.loads(LINE), "arrival": "x" * (MAX_LINE // 2)}),
        json.dumps({**json.loads(LINE), "arrival": 10**400}),
        json.dumps({**json.loads(LINE), "answer": ["x" * (MAX_LINE // 2), 0]}),
        " " * (MAX_LINE + 1),
    ],
    ids=["broken", "long value", "large number", "long name", "long line"],
)
def test_a_broken_line_is_named_in_a_short_message(wrong: str, times: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{LINE}\n{wrong}\n")
    result = run("--times", times, "--trace", str(trace))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "trace.jsonl, line 2" in result.stderr
    assert len(result.stderr) < 1000
