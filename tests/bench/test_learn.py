"""`bench learn`: what it compares and writes, and that repeated requests teach a drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from soothsay.bench import learn
from soothsay.cli.app import app
from soothsay.core.params import SamplingParams
from soothsay.drafters.base import Drafter
from soothsay.llm import LLM

PROMPTS = ["Tell me about rain.", "What is a fox?", "Name three colours."]


def bench(folder: Path, prompts: Sequence[str], *options: str) -> Result:
    stream = folder / "stream.jsonl"
    chats = ({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    stream.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = ["bench", "learn", "sibyl", str(stream), "-d", "mtp", "--json", str(folder / "out.json")]
    return CliRunner().invoke(app, [*command, *options])


def written(folder: Path) -> Any:
    return json.loads((folder / "out.json").read_text())


def test_windows_and_what_is_compared(tmp_path: Path) -> None:
    options = ("--window", "2", "--held-out", "2", "--every", "2", "--batch", "2", "-n", "4")
    result = bench(tmp_path, PROMPTS * 2, *options)
    assert result.exit_code == 0, result.output
    report = written(tmp_path)
    names = [sorted(window["runs"]) for window in report["windows"]]
    assert names == [["learning", "plain", "static"], ["learning"], ["learning", "plain", "static"]]
    assert [window["first"] for window in report["windows"]] == [0, 2, 4]
    assert [window["held_out"] for window in report["windows"]] == [False, False, True]
    assert (report["compared"], report["different"]) == (8, 0)
    assert {run["tokens"] for run in report["windows"][0]["runs"].values()} == {8}
    assert "8 of 8 answers equal" in " ".join(result.output.split())


def test_repeated_requests_teach_the_drafter(tmp_path: Path) -> None:
    options = ("--window", "2", "--held-out", "2", "--share", "1", "-n", "24")
    assert bench(tmp_path, PROMPTS[:1] * 6, *options).exit_code == 0
    steps = [
        {name: run["steps"] for name, run in window["runs"].items()}
        for window in written(tmp_path)["windows"]
    ]
    assert steps[-1]["learning"] < 0.8 * steps[-1]["static"]
    assert steps[-1]["static"] < steps[-1]["plain"]


def test_other_answers_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = learn._run

    def changed(llm: LLM, drafter: Drafter, *asked: Any) -> tuple[learn.WindowRun, list[list[int]]]:
        measured, answers = run(llm, drafter, *asked)
        return measured, answers if drafter.name == "none" else [[*answer, 0] for answer in answers]

    monkeypatch.setattr(learn, "_run", changed)
    assert bench(tmp_path, PROMPTS, "--held-out", "0", "-n", "2").exit_code == 1
    assert written(tmp_path)["different"] == 6


def test_an_interruption_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = learn._run, 0

    def interrupted(
        llm: LLM, drafter: Drafter, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> tuple[learn.WindowRun, list[list[int]]]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        return run(llm, drafter, prompts, params)

    monkeypatch.setattr(learn, "_run", interrupted)
    result = bench(tmp_path, PROMPTS, "--window", "1", "--held-out", "1", "-n", "2")
    assert result.exit_code != 0
    assert "2 of 2 answers equal" in " ".join(result.output.split())
    assert [window["first"] for window in written(tmp_path)["windows"]] == [0]


def test_a_stream_without_requests_to_learn_from_is_refused(tmp_path: Path) -> None:
    result = bench(tmp_path, PROMPTS, "--held-out", "3")
    assert result.exit_code == 2
    assert "the stream has 3 requests" in " ".join(result.stderr.split())


def test_a_drafter_that_cannot_learn_is_refused(tmp_path: Path) -> None:
    result = bench(tmp_path, PROMPTS, "-d", "suffix", "--held-out", "0")
    assert result.exit_code != 0
    assert "no trained part" in " ".join((result.stderr or str(result.exception)).split())
