"""A name that is no model's gets one error with names that work, from each command that takes a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay.cli.app import app

COMMANDS = {
    "generate": "generate hi --model NAME",
    "chat": "chat NAME",
    "demo": "demo --model NAME",
    "inspect": "inspect NAME",
    "verify": "verify NAME",
    "pull": "pull NAME",
    "quantize": "quantize NAME OUT",
    "grow": "grow NAME OUT",
    "bench spec": "bench spec NAME",
    "bench step": "bench step NAME",
}
NAMES = {
    "smolm2": "Did you mean smollm2? ",
    "smollm": "Did you mean smollm2? ",
    "no/such/path": "",
    "/no/such/path": "",
    "HuggingFaceTB/SmolLM2-135M": "Did you mean smollm2? ",
    "FOLDER/model.Q4_0.gguf": "Did you mean FOLDER/model.Q4_1.gguf? ",
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)


def error_of(command: str, name: str, folder: Path) -> str:
    """The one line on stderr."""
    given = [{"NAME": name, "OUT": str(folder / "out")}.get(word, word) for word in command.split()]
    result = CliRunner().invoke(app, given, input="")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_suggests_a_name(command: str, tmp_path: Path) -> None:
    error = error_of(command, "smolm2", tmp_path)
    assert error.startswith("Error: ")
    assert error.endswith("Did you mean smollm2? 'soothsay models' lists names that work\n")


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_name_gets_a_suggestion(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    error = error_of(COMMANDS["inspect"], name.replace("FOLDER", str(tmp_path)), tmp_path)
    expected = NAMES[name].replace("FOLDER", str(tmp_path))
    assert error.endswith(f". {expected}'soothsay models' lists names that work\n")


@pytest.mark.parametrize("command", ["serve", "batch in.jsonl out.jsonl"])
def test_a_command_that_needs_a_model_says_so(command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert "Error: give " in result.stderr
