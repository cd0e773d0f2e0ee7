"""A file that a benchmark writes in the end: a missing folder is told before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from soothsay.cli.app import app

COMMANDS = get_command(app).commands["bench"].commands
WRITTEN = [
    (name, option)
    for name, command in COMMANDS.items()
    for parameter in command.params
    for option in {"--json", "--png", "--html", "--markdown"}.intersection(parameter.opts)
]


@pytest.mark.parametrize(("command", "option"), WRITTEN)
def test_a_missing_folder_is_told_at_once(command: str, option: str, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "results"
    result = CliRunner().invoke(app, ["bench", command, f"{option}={file}"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"there is no folder {file.parent} for results; make it first" in result.output


def test_all_benchmarks_write_files() -> None:
    assert {name for name, _ in WRITTEN} == {*COMMANDS}
