"""`soothsay batch`: whatever stops it, the same command goes on and gives what one run would have given."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from serving import WarmEngine
from typer.testing import CliRunner, Result

from soothsay.cli.app import app

OPTIONS = ("--dtype", "float32", "--kv-tokens", "8192", "--drafter", "suffix")


@pytest.fixture(autouse=True)
def _warm_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.server.placement.EngineProcess", WarmEngine)


def write(path: Path, count: int, max_tokens: int = 24) -> Path:
    """A file of requests: greedy ones, sampled ones without a seed, and some that fail."""
    lines: list[str] = []
    for index in range(count):
        body: dict[str, Any] = {"model": "sibyl", "temperature": index % 2, "max_tokens": max_tokens}
        if index % 3:
            url, body["prompt"] = "/v1/completions", f"{'The house by the sea. ' * 5}{index}"
        else:
            url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"Why {index}?"}]
        body |= {"n": 2, "logprobs": 1} if index % 3 == 1 else {}
        body |= {"top_p": 7} if index % 40 == 39 else {}
        lines.append(json.dumps({"custom_id": f"id-{index}", "method": "POST", "url": url, "body": body}))
    lines[count // 2] = "no JSON"
    path.write_text("\n".join(lines))
    return path


def arguments(source: Path, output: Path, *options: str) -> list[str]:
    return ["batch", "sibyl", str(source), str(output), *OPTIONS, *options]


def run(source: Path, output: Path, *options: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments(source, output, *options), env={"COLUMNS": "200"})


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def stopped(source: Path, output: Path, how: signal.Signals, after: int, *options: str) -> tuple[int, str]:
    """Run the command in a process, and send a signal some time after a number of lines of output."""
    process = Command(*arguments(source, output, *options))
    while len(lines(output)) < after:
        assert not process.ended, process.finish()
        time.sleep(0.002)
    time.sleep(random.random() / 20)
    process.send(how)
    code, out, err = process.finish(60)
    return code, err or out


def limited(source: Path, output: Path, kilobytes: int) -> tuple[int, str]:
    """Run the command in a process whose files cannot grow beyond a size, as if the disk were full."""
    limits = {resource.RLIMIT_FSIZE: 1024 * kilobytes}
    code, _, err = Command(*arguments(source, output), limits=limits).finish()
    return code, err


def test_several_engines_answer_what_one_would(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", 30, max_tokens=8)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert "30 lines: 29 answered, 1 failed (the first is line 16; " in run(source, one).output
    assert "30 lines: 29 answered, 1 failed" in run(source, two, "--replicas", "2").output
    assert sorted(lines(two)) == sorted(lines(one))


@pytest.mark.slow
def test_it_goes_on_after_whatever_stops_it(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", 120, max_tokens=8), tmp_path / "out.jsonl"
    clean = run(source, tmp_path / "clean.jsonl", "--drafter", "none")
    assert clean.exit_code == 1
    assert "120 lines: 116 answered, 4 failed" in clean.output
    for how, after, options in (
        (signal.SIGKILL, 10, ("--max-running", "7")),
        (signal.SIGTERM, 25, ()),
        (signal.SIGINT, 40, ("--max-running", "5", "--drafter", "none")),
    ):
        before = lines(output)[:-1]
        after = max(after, len(before) + 5)  # in the midst of answering: a run before may have come further
        code, printed = stopped(source, output, how, after, *options)
        assert code == (-signal.SIGKILL if how is signal.SIGKILL else 130), printed
        assert how is signal.SIGKILL or printed.endswith(" of 120 lines); the same command goes on\n")
        assert after <= len(lines(output)) < 120
        assert lines(output)[: len(before)] == before
    full = limited(source, output, output.stat().st_size // 1024 + 4)
    assert full[0] == 2
    assert "out.jsonl cannot be written (File too large). The answers in it are kept" in full[1]
    before = [line for line in lines(output) if line.endswith(b"\n")]
    assert 40 < len(before) < 120
    output.write_bytes(b"".join(before) + before[0][:-1])  # torn in any case
    last = run(source, output)
    assert last.exit_code == 1
    assert "120 lines: 116 answered, 4 failed" in last.output
    assert f"; {len(before)} lines had their answer before" in last.output
    assert lines(output)[: len(before)] == before
    assert sorted(lines(output)) == sorted(lines(tmp_path / "clean.jsonl"))
    again = run(source, output)
    assert again.exit_code == 1
    assert "0 tokens" in again.output


@pytest.mark.slow
def test_thousands_of_lines_killed_three_times(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", 5000, max_tokens=8), tmp_path / "out.jsonl"
    run(source, tmp_path / "clean.jsonl")
    for after in (500, 2000, 4000):
        assert stopped(source, output, signal.SIGKILL, after)[0] == -signal.SIGKILL
    assert run(source, output).exit_code == 1
    assert sorted(lines(output)) == sorted(lines(tmp_path / "clean.jsonl"))


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """An input, and an output in which each line has failed, so that no model is needed."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a"}\n?\n')
    result = run(source, output, "--drafter", "none")
    assert (result.exit_code, len(lines(output))) == (1, 2)
    assert f"2 failed (the first is line 1; {output} has the reasons); " in result.output
    return source, output


def test_what_would_mix_two_batches_is_refused(begun: tuple[Path, Path], tmp_path: Path) -> None:
    source, output = begun
    content = output.read_bytes()
    for options, message in (
        (("--seed", "1"), "begun with another seed: 0, and now it is 1"),
        (("--dtype", "int8"), "begun with another dtype: float32, and now it is int8"),
        (("--max-context", "512"), "begun with another context: None, and now it is 512"),
        (("--served-model-name", "x"), "begun with another model's name in requests: sibyl, and now it is x"),
    ):
        refused = run(source, output, *options)
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
    other_model = CliRunner().invoke(
        app, ["batch", "smollm2", str(source), str(output), "--dtype", "float32"]
    )
    assert other_model.exit_code == 2
    assert "begun with another model: sibyl, and now it is smollm2" in other_model.output.replace("\n", " ")
    source.write_text('{"custom_id": "b"}\n?\n')
    refused = run(source, output)
    assert (refused.exit_code, "begun with another input. Use" in refused.output) == (2, True)
    assert output.read_bytes() == content
    assert "is the input" in run(source, source).output
    assert "there is no x.state" in run(source, write(tmp_path / "x", 3)).output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "has the custom_id 'a' in line 1 and again in line 3"),
        (None, "there is no file "),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, content: str | None, message: str
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    if content is not None:
        source.write_text(content)
    refused = run(source, output)
    assert (refused.exit_code, message in refused.output) == (2, True), refused.output
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", 3)
    refused = CliRunner().invoke(app, ["batch", "no-such-model", str(source), str(tmp_path / "no" / "out")])
    assert refused.exit_code == 2
    assert re.search(r"there is no folder \S+/no for out; make it first", refused.output.replace("\n", " "))
