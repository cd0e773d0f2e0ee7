"""Every `soothsay train` command for a few steps: it resumes to the same bits, and its drafter is served."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams
from soothsay.cli.app import app
from soothsay.drafters.heads.checkpoints.head_directory import read_head
from soothsay.model.ops.linear import multiplies_bfloat16
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.train.heads import MedusaRecipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning"),  # four steps teach little
]

QUICK = ("mtp", "eagle3", "block")
COMMANDS = {
    "lm": "",
    "mtp": "--depth 2",
    "medusa": "--heads 2",
    "hydra": "--heads 2",
    "eagle": "--depth 2",
    "eagle3": "--depth 2 --vocabulary 512 --units 64 --join --anchors 0.4 --divergence lk",
    "block": "--size 3 --cell 32 --shortlist 50",
    "redrafter": "--size 3 --hidden 32 --cell 16 --shortlist 50",
    "draft": "--layers 1 --hidden 64 --heads 2 --intermediate 64 --on-policy 0.5",
}
MUON = ("lm", "mtp", "hydra", "eagle", "block", "redrafter")
"""Commands that train square matrices by Muon, in bfloat16: minutes a step on processors without it."""

DRAFTERS = {name: name for name in COMMANDS} | {"lm": "draft-model", "draft": "draft-model"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i} to {i + 3}."},
                {"role": "assistant", "content": f"{i}, {i + 1}, {i + 2} and {i + 3}."},
            ]
        }
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train(name: str, data: Path, out: Path, *more: str) -> str:
    options = f"--steps 4 --batch-tokens 128 --held-out 1 --save-every 2 --seed 3 {COMMANDS[name]}"
    command = ["train", name, "sibyl", str(data), "--out", str(out), *options.split(), *more]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMMANDS]
)
def test_resumes_to_the_same_bits_and_is_served(name: str, data: Path, tmp_path: Path) -> None:
    if name in MUON and not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = train(name, data, whole)
    assert "step 4: loss" in output
    train(name, data, parts, "--stop-after", "2")
    assert not (parts / "config.json").exists()  # nothing has been evaluated
    assert "resuming after step 2" in train(name, data, parts)
    ours, theirs = (load_file(path / "training" / "state.safetensors") for path in (whole, parts))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (whole / "training" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    llm = LLM("sibyl", drafter=f"{DRAFTERS[name]}(model={whole})", max_context=64)
    answer = llm.generate("Count", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert answer.token_ids == llm.generate("Count", answer_params(), drafter="none").token_ids


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_learns_from_the_features_of_answers(name: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    command = f"train data sibyl {data} --out {out} --features {name} --limit 6 --max-tokens 8 --batch 2"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    features = tmp_path / "answers.features"
    assert str(features) in result.output
    place = tmp_path / "a, b (2) [c]"  # what separates a drafter's options, and what rich reads as a style
    output = train(name, features, place)
    assert "step 4: loss" in output
    assert f"{place} has the best checkpoint" in output
    assert CliRunner().invoke(app, [*command.split(), "--drafter", "suffix"]).exit_code == 2
    other = "eagle3" if name == "medusa" else "medusa"
    command = f"train {other} sibyl {features} --out {tmp_path / 'other'} --steps 1 --held-out 1"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert "--features of this drafter" in " ".join(result.output.split())


def test_a_list_counts_more_answers_than_are_trained_on(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    text = "Fjords, zebras and quartz."
    asked = {"role": "user", "content": "What?"}
    lines = [{"messages": [asked, {"role": "assistant", "content": text}]}] * 40
    other.write_text("\n".join(map(json.dumps, lines)))
    listed = []
    for more in ([], ["--count", str(other)]):
        train("eagle3", data, tmp_path / f"head{len(more)}", "--vocabulary", "60", *more)
        head = read_head(tmp_path / f"head{len(more)}", LLM("sibyl", drafter="none").engine.target)
        listed.append(set(head.listed.tolist()))
    said = set(open_checkpoint("sibyl").tokenizer().encode(text))
    assert said <= listed[1]
    assert not said <= listed[0]


def answer_params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_weights_change_and_the_target_does_not(data: Path, tmp_path: Path) -> None:
    """The state holds only the head's weights, and each of them changes between step 2 and step 4."""
    before = files(open_checkpoint("sibyl").path)
    states = []
    for more in (["--stop-after", "2"], []):
        train("medusa", data, tmp_path / "out", *more)
        state = load_file(tmp_path / "out" / "training" / "state.safetensors")
        states.append({name: tensor for name, tensor in state.items() if name.startswith("weights.")})
    first, last = states
    assert first.keys() == last.keys()
    assert set(first) == {
        f"weights.blocks.{k}.0.linear.{part}" for k in (0, 1) for part in ("weight", "bias")
    }
    assert not any(torch.equal(first[name], last[name]) for name in first)
    assert files(open_checkpoint("sibyl").path) == before
    assert len(before) > 2


def files(directory: Path) -> dict[Path, bytes]:
    """The digest of each file."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in paths}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--held-out", "20"], "20 conversations, and 20 are kept for evaluation"),
        (["--max-tokens", "8"], "nothing to train on"),
    ],
)
def test_too_little_data_is_an_error(arguments: list[str], reason: str, data: Path, tmp_path: Path) -> None:
    command = ["train", "medusa", "sibyl", str(data), "--out", str(tmp_path / "out"), *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_a_divergence_that_is_none_is_refused(data: Path, tmp_path: Path) -> None:
    command = ["train", "draft", "sibyl", str(data), "--out", str(tmp_path / "out"), "--divergence", "kl"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "forward-kl" in result.output
    assert not (tmp_path / "out").exists()


def test_the_end_says_what_is_done_and_how_to_go_on(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nothing = f"{out} has nothing to use yet: an evaluation writes it\n"
    stopped = train("medusa", data, out, "--stop-after", "2")
    assert stopped.endswith(f"step 2 of 4 is done, and the same command goes on; {nothing}")
    fewer = train("medusa", data, out, "--steps", "2")
    assert fewer.endswith(f"step 2 of 2 is done, and --steps above 2 goes on; {nothing}")
    assert train("medusa", data, out).endswith("; step 4 of 4 is done, and --steps above 4 goes on\n")


def test_an_interrupt_says_where_the_next_call_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, calls = MedusaRecipe.losses, []

    def interrupted(recipe: MedusaRecipe, *parts: Any) -> dict[str, torch.Tensor]:
        calls.append(parts)
        if len(calls) == 2 * 3 + 1:  # step 4: a step has two parts
            raise KeyboardInterrupt
        return losses(recipe, *parts)

    monkeypatch.setattr(MedusaRecipe, "losses", interrupted)
    options = ["--steps", "4", "--batch-tokens", "128", "--held-out", "2", "--save-every", "2"]
    command = ["train", "medusa", "sibyl", str(data), "--out", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 130
    assert "stopped in step 4; the same command resumes after step 2" in result.output
    monkeypatch.undo()
    assert "resuming after step 2" in CliRunner().invoke(app, command).output
