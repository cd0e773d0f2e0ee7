"""`bench length`: stretches of answers, loops, long prompts, and files that are continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from soothsay import LLM
from soothsay.bench import length
from soothsay.bench.bench_plans import LengthPlan
from soothsay.bench.length import (
    LengthBench,
    LengthRecord,
    LengthResults,
    LengthRow,
    length_chart,
    length_table,
    repeated_shares,
)
from soothsay.cli.app import app
from soothsay.plotting import save_png


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": n, "category": "qa", "turns": [f"Tell me about river number {n}."]}
        for n in range(900)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def record(drafter: str = "none", **other: Any) -> LengthRecord:
    fixed: dict[str, Any] = {
        "wanted": 0,
        "item": "1",
        "prompt": 9,
        "digest": "a",
        "repeated": [0.1, 0.3, 0, 0],
    }
    fixed |= {"tokens": [8, 4, 0, 0], "steps": [8, 4, 0, 0], "seconds": [2.0, 1.0, 0.0, 0.0]}
    return LengthRecord(drafter, **fixed | other)


def test_rows_are_sums_over_the_answers_that_reach_a_stretch() -> None:
    results = LengthResults({})
    for item, share in (("1", 0.3), ("2", 0.9)):  # the second one loops in its second stretch
        results.add(record(item=item, repeated=[0.1, share, 0, 0]))
        faster = {"steps": [4, 2, 0, 0], "seconds": [1.0, 0.25, 0.0, 0.0]}
        results.add(record("auto", item=item, repeated=[0.1, share, 0, 0], **faster))
    results.add(record("auto", item="3"))  # plain decoding has no answer yet
    assert results.rows() == [
        LengthRow("auto", 0, 0, answers=2, accepted=2.0, speedup=2.0, repeated=0.1),
        LengthRow("auto", 0, 1, answers=1, accepted=2.0, speedup=4.0, repeated=0.3),
    ]
    assert length_table(results).rows[1] == ["auto", "as it is", "256 to 1024", "1", "2.00", "4.00", "30%"]
    assert results.different == 0
    results.add(record("auto", digest="b"))
    assert results.different == 1


def test_repeated_grams_count_where_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "BORDERS", (0, 6, 100))
    assert repeated_shares([1, 2, 3, 4, 5, 1, 2, 3, 4]) == [0.0, 1 / 3]
    assert repeated_shares([1] * 9) == [2 / 3, 1.0]
    assert repeated_shares([1, 2]) == [0.0, 0.0]


def test_all_tokens_after_the_first_step_are_in_stretches(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "BORDERS", (0, 3, 5, 1 << 30))
    plan = LengthPlan(model="sibyl", prompts=questions, requests=2, max_tokens=6, prompt_tokens=[0, 120])
    path, llm = tmp_path / "out.jsonl", LLM("sibyl", drafter="none", max_requests=1, prefix_caching=False)
    results = LengthBench(llm, plan, path).run()
    assert results.different == 0
    assert {name for name, *_ in results.by_key} == {"none", "auto", "suffix"}
    assert len(results.by_key) == 3 * 2 * 2
    for (name, wanted, _), one in results.by_key.items():
        assert sum(one.tokens) == 5
        assert min(one.seconds) >= 0
        assert wanted == 0 or 110 <= one.prompt <= 160
        if name == "none":
            assert one.steps == one.tokens

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"suffix"' not in line))
    again = LengthBench(llm, plan, path).run()
    assert {key: one.digest for key, one in again.by_key.items()} == {
        key: one.digest for key, one in results.by_key.items()
    }
    key = next(key for key in results.by_key if key[0] == "auto")
    assert again.by_key[key].seconds == results.by_key[key].seconds  # it was not measured again
    save_png(length_chart(results), tmp_path / "chart.png", dpi=50)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_command(questions: Path, tmp_path: Path) -> None:
    def run(*more: str) -> Result:
        options = [
            "--spec-bench",
            str(questions),
            "--requests",
            "1",
            "--max-tokens",
            "12",
            "-d",
            "suffix",
            *more,
        ]
        return CliRunner().invoke(app, ["bench", "length", "sibyl", *options], env={"COLUMNS": "160"})

    result = run("--png", str(tmp_path / "chart.png"), "--prompt-tokens", "0", "--prompt-tokens", "5000")
    assert result.exit_code == 0, result.output
    assert "suffix" in result.stdout
    assert "0 to 256" in result.stdout
    assert "2 answers left out: the context is too short" in result.stdout
    assert (tmp_path / "chart.png").is_file()
    assert "| suffix | as it is | 0 to 256 | 1 | " in run("--markdown", "-").stdout
