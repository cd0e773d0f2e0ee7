"""Options from a file: TOML with a table for each command, as `--config FILE` reads it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from soothsay.errors import did_you_mean

LARGEST = 1 << 20
"""Limit of bytes of a file."""


def read_settings(path: Path, commands: TyperGroup) -> dict[str, Any]:
    """Read the values of options by command and name, as click's `default_map` takes them.

    Raises `typer.BadParameter` for a file that is no TOML, and for a command or an option that is unknown.
    """
    try:
        content = path.read_bytes()[: LARGEST + 1]
        if len(content) > LARGEST:
            raise typer.BadParameter(f"{path} has more than {LARGEST:,} bytes")
        return _values(path, "", tomllib.loads(content.decode()), commands)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from None


def _values(path: Path, place: str, table: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """The values of a command's table. `place`: where it is in the file."""
    commands: Mapping[str, Any] = command.commands if isinstance(command, TyperGroup) else {}
    options = {str(own.name).replace("_", "-"): own for own in command.params}
    known, values = commands or options, dict[str, Any]()
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            what = f"no {'command' if commands else 'option'} {place}{key}"
            raise typer.BadParameter(f"{path}: there is {what}{did_you_mean(name, known)}")
        if not commands:
            own = options[name]
            repeats = own.nargs != 1 or getattr(own, "multiple", False)
            several = value if repeats and isinstance(value, list) else [value]
            if own.name in values:
                raise typer.BadParameter(f"{path}: {place}{key} is there twice, with - and with _")
            if any(isinstance(one, dict | list) for one in several):
                what = "a text or a number, or a list of them" if repeats else "a text or a number"
                raise typer.BadParameter(f"{path}: {place}{key} must be {what}")
            texts = [str(one) for one in several]  # as on the command line: 1.5 and true are no integers
            values[str(own.name)] = texts if repeats else texts[0]
        elif isinstance(value, dict):
            values[name] = _values(path, f"{place}{key}.", value, commands[name])
        else:
            what = f"{place}{key} must be a table of options, such as [{place}{key}]"
            raise typer.BadParameter(f"{path}: {what}")
    return values
