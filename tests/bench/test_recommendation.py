"""What `bench spec` recommends, from rates that are made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay.bench.spec.recommendation import recommendations
from soothsay.bench.spec.run_times import RunTimes
from soothsay.bench.spec.spec_page import interval_table
from soothsay.bench.spec.spec_results import Lap, SpecResults
from soothsay.cli.app import app

ABOUT = dict.fromkeys(("dtype", "questions", "max_tokens", "nodes", "threads", "processor", "soothsay"), 1)


def measured(
    speeds: dict[str, list[float]],
    different: int = 0,
    temperatures: tuple[float, ...] = (0.0,),
    cpu: dict[str, float] | None = None,
) -> SpecResults:
    """Plain decoding answers each question in a second, and drafters at these multiples of its speed.

    `cpu` has each contender's seconds of CPU time a question.
    """
    results = SpecResults({"model": "my model", **ABOUT})
    for temperature in temperatures:
        for number in range(len(next(iter(speeds.values())))):
            rates = {"none": 1.0} | {name: of[number] for name, of in speeds.items()}
            runs = {
                name: RunTimes(
                    *(1, different, 10, 1 / rate),
                    prefill=0.1,
                    ahead=1,
                    steps=10,
                    cpu=(cpu or {}).get(name, 0),
                )
                for name, rate in rates.items()
            }
            results.add(Lap(temperature, 1, 1, "qa", [number], 0, [number], 0, runs))
    return results


def test_the_speedup_of_one_question_has_no_interval() -> None:
    (row,) = interval_table(measured({"suffix": [0.5]})).rows
    assert row[3:] == ["0.50 ?", "0.50 ?"]
    (row,) = interval_table(measured({"suffix": [0.5, 0.5]})).rows
    assert row[3:] == ["0.50-0.50 ✗"] * 2


FAST = [1.5 + 0.01 * (i % 5) for i in range(20)]
NOISY = [1.2 if i % 2 else 1.9 for i in range(20)]


@pytest.mark.parametrize(
    ("speeds", "drafter", "said"),
    [
        (
            {"auto": [1.2] * 20, "suffix": FAST},
            "suffix",
            "Use suffix: it is 1.52 times as fast as plain decoding (95% interval 1.51 to 1.53, 20 "
            "questions), and faster than all others here.",
        ),
        (
            {"auto": FAST, "suffix": NOISY, "mtp": [0.9] * 20},
            "auto",
            "Use auto: it is 1.52 times as fast as plain decoding (95% interval 1.51 to 1.53, 20 questions); "
            "suffix (1.55) cannot be told apart with 20 questions.",
        ),
        (
            {"auto": [0.8] * 20, "x(a=1)": [0.9] * 20},
            "none",
            "Use no drafter: even the best one, x(a=1), is only 0.90 times",
        ),
        (
            {"x(a=1)": [0.5, 2.0, 0.8]},
            "x(a=1)",
            "x(a=1) may be worth trying: it is 1.10 times as fast as plain decoding (95% interval 0.50 to "
            "2.00, 3 questions, so few that this is rough: more prompts, or --rounds N, say more), which "
            "may be chance.",
        ),
        (
            {"auto": [1.5], "suffix": [1.2]},
            "auto",
            "auto may be worth trying: it is 1.50 times as fast as plain decoding (1 question, so few",
        ),
        (
            {"suffix": FAST},
            "suffix",
            "Use suffix: it is 1.52 times as fast as plain decoding (95% interval 1.51 to 1.53, 20 "
            "questions).",
        ),
    ],
)
def test_the_fastest_for_sure_or_auto(speeds: dict[str, list[float]], drafter: str, said: str) -> None:
    ((sentence, command),) = recommendations(measured(speeds))
    assert sentence.startswith(said)
    quoted = f"'{drafter}'" if "(" in drafter else drafter
    assert command == f"soothsay serve 'my model' --drafter {quoted}"


def test_on_a_busy_machine_the_processors_time_decides() -> None:
    speeds, taken = {"auto": FAST, "suffix": [1.2] * 20}, {"none": 0.5, "auto": 0.5, "suffix": 0.4}
    ((sentence, command),) = recommendations(measured(speeds, cpu=taken))
    assert sentence == (
        "Use suffix: it is 1.25 times as fast as plain decoding by CPU time (95% interval 1.25 to 1.25, 20 "
        "questions), and faster than all others here."
    )
    assert command.endswith("--drafter suffix")
    quiet = {"none": 0.99, "auto": 0.65, "suffix": 0.8}
    ((sentence, _),) = recommendations(measured(speeds, cpu=quiet))
    assert sentence.startswith("Use auto: it is 1.52 times as fast as plain decoding (95%")


def test_the_command_has_the_drafter_without_its_verifier() -> None:
    results = measured({"suffix, block": FAST, "x(a=1, b=2)": NOISY})
    results.conditions["verifiers"] = ["match", "block"]
    ((sentence, command),) = recommendations(results)
    assert sentence.startswith(("Use suffix, block", "Use x(a=1, b=2)"))
    assert command.endswith(("--drafter suffix", "--drafter 'x(a=1, b=2)'"))


def test_nothing_is_recommended_that_is_not_compared() -> None:
    assert not [*recommendations(measured({"auto": FAST}, different=1))]
    assert not [*recommendations(measured({}.fromkeys(["none"], FAST)))]


def test_each_setting_has_its_own() -> None:
    both = [*recommendations(measured({"auto": FAST}, temperatures=(0.0, 1.0)))]
    assert [said.partition(":")[0] for said, _ in both] == [
        "At temperature 0, batch 1",
        "At temperature 1, batch 1",
    ]


def test_questions_of_one_batch_count_once(tmp_path: Path) -> None:
    file = tmp_path / "my.txt"
    file.write_text("Why is the sky blue?\nName a colour.\nName a bird.\n")
    asked = ["--prompts", str(file), "-d", "suffix", "-n", "4", "--batch", "2", "--batch", "4"]
    result = CliRunner().invoke(app, ["bench", "spec", *asked], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert re.search(r"^At temperature 0, batch 2: .*, 2 batches, so few", result.output, re.MULTILINE)
    assert re.search(r"^At temperature 0, batch 4: .*\(1 batch, so few", result.output, re.MULTILINE)


def test_a_stranger_gets_a_sentence_and_the_line_to_type(tmp_path) -> None:
    file = tmp_path / "my.txt"
    file.write_text("Why is the sky blue?\n\nName a colour.\n")
    options = ["bench", "spec", "--prompts", str(file), "-d", "suffix", "-n", "8"]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "2 prompts, in turns by none, suffix; at most 10 minutes" in result.output
    assert "2 questions, so few" in result.output
    drafter = "none" if "Use no drafter" in result.output else "suffix"
    assert f"\n  soothsay serve sibyl --drafter {drafter}\n" in result.output
