"""`--help` of every command in 80 columns: whole names, ten options first, the others by group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.cli.command_classes import MOST


def _commands(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    yield name, command
    for own, one in inner.items():
        yield from _commands(one, (*name, own))


EVERY = list(_commands(get_command(app)))


@pytest.fixture(params=EVERY, ids=[" ".join(name) or "soothsay" for name, _ in EVERY])
def shown(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A command, and its help."""
    name, command = request.param
    result = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "80", "TERM": "xterm"})
    assert result.exit_code == 0
    return command, re.sub(r"\x1b\[[\d;]*m", "", result.stdout)


def test_no_name_is_cut(shown: tuple[Any, str]) -> None:
    command, text = shown
    options = [name for one in command.params for name in (*one.opts, *one.secondary_opts) if name[0] == "-"]
    for name in (*options, *getattr(command, "commands", {})):
        assert re.search(rf"^ +.*(?<![\w-]){re.escape(name)}(?![\w-])", text, re.MULTILINE), name
    assert not re.search(r"…|\w\.\.\.$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


def test_ten_options_come_first(shown: tuple[Any, str]) -> None:
    _, text = shown
    first = re.split(r"\n\n(?=\S)", text[text.index("\nOptions:") + 1 :])[0]
    names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", first, re.MULTILINE)
    assert 1 <= len(set(names) - {"--help"}) + 1 <= MOST + 1
    assert "SOOTHSAY_SERVE_API_KEY" in text or "env var" not in text


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("serve --bogus", ""),
        ("serve --prot", " (Possible options: --port)"),
        ("train medusa --stpes", "--steps)"),
    ],
)
def test_an_unknown_option_offers_close_names_only(given: str, hint: str) -> None:
    result = CliRunner().invoke(app, given.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert re.search(rf"No such option: --\w+.*{re.escape(hint)}$", result.output.strip())
    assert ("Possible" in result.output) == bool(hint)


def test_the_options_of_models_are_the_same_everywhere() -> None:
    commands = {" ".join(name): command for name, command in EVERY}
    for name in ("generate", "chat", "serve", "batch", "verify"):
        known = {option for one in commands[name].params for option in one.opts}
        wanted = {"--model", "--drafter", "--dtype", "--kv-dtype", "--kv-memory", "--threads", "--device"}
        assert {*wanted, "--max-context", "--chat-template", "--kernels"} <= known, name


def test_options_beyond_ten_without_a_group_have_one_of_their_own() -> None:
    text = CliRunner().invoke(app, ["bench", "spec", "--help"]).stdout
    assert re.search(r"^More options:\n", text, re.MULTILINE)
