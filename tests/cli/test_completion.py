"""What shells put in place of a word that was begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.drafters.registry import REGISTRY
from soothsay.options import DRAFTERS, models_like


def complete(words: str) -> list[str]:
    """What bash gets for the last word."""
    place = str(len(words.split(" ")) - 1)
    asked = {"_SOOTHSAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    return CliRunner().invoke(app, [], prog_name="soothsay", env=asked).stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("soothsay gen", ["generate"]),
        ("soothsay serve smol", ["smollm2"]),
        ("soothsay chat --model sib", ["sibyl"]),
        ("soothsay generate -m sib", ["sibyl"]),
        ("soothsay bench spec smol", ["smollm2"]),
        ("soothsay serve x --drafter eag", ["eagle", "eagle2", "eagle3"]),
        ("soothsay verify x -d suf", ["suffix"]),
        ("soothsay serve --kv-m", ["--kv-memory"]),
    ],
)
def test_bash_completes(words: str, found: list[str]) -> None:
    assert complete(words) == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete(shell: str) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "soothsay serve smol", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {"_SOOTHSAY_COMPLETE": f"complete_{shell}", **asked}
    assert "smollm2" in CliRunner().invoke(app, [], prog_name="soothsay", env=environment).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: (shell, f"/bin/{shell}"))
    result = CliRunner().invoke(app, ["--show-completion"], prog_name="soothsay")
    assert f"complete_{shell}" in result.stdout


def test_no_shell_is_named() -> None:
    for option in ("--show-completion", "--install-completion"):
        result = CliRunner().invoke(app, [option, "nosh"], prog_name="soothsay", env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert f"leave 'nosh' out: {option} is for the shell that runs it" in result.output


def test_files_of_models_and_folders_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    for name in ("one.gguf", "one.txt", "models/two.gguf"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert models_like("o") == ["one.gguf"]
    assert models_like("mo") == ["models/"]
    assert models_like("models/") == ["models/two.gguf"]
    assert models_like(f"{tmp_path}/o") == [f"{tmp_path}/one.gguf"]


def test_the_names_of_drafters_are_those_of_the_registry() -> None:
    assert tuple(REGISTRY) == DRAFTERS
