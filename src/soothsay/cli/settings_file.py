"""Options from a file: TOML with a table for each command, as `--config FILE` reads it; and variables."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from soothsay.errors import did_you_mean

LARGEST = 1 << 20
"""Limit of bytes of a file."""

OTHERS = "SOOTHSAY_DEVICE", "SOOTHSAY_KERNELS"
"""Variables that are no options'."""

FOREIGN = "SOOTHSAY_SERVICE_", "SOOTHSAY_PORT"
"""How variables begin that Kubernetes sets beside a service named soothsay."""

DASHES = str.maketrans("-.", "__")

CLOSE = 0.9
"""How much alike a variable and a misspelt one are, at least: they share their beginning."""


def misspelt_variables(given: Iterable[str], commands: TyperGroup, chosen: str | None) -> Iterator[str]:
    """What to say of variables that are nearly an option's, or lack the name of the `chosen` command."""
    names = {f"SOOTHSAY_{place}_{name}".upper().translate(DASHES) for place, name in _options("", commands)}
    for one in sorted({*given} - names - {*OTHERS}):
        if one.startswith("SOOTHSAY_") and not one.startswith(FOREIGN):
            full = f"SOOTHSAY_{chosen}{one.removeprefix('SOOTHSAY')}".upper()
            for meant in [full] if full in names else get_close_matches(one, names, 1, CLOSE):
                yield f"the variable {one} is no option's, and is ignored. Did you mean {meant}?"


def _options(place: str, command: Any) -> Iterator[tuple[str, str]]:
    """The options of all commands below one: the command, such as "bench.spec", and the name."""
    if not isinstance(command, TyperGroup):
        yield from ((place, str(own.name).replace("_", "-")) for own in command.params)
        return
    for name, inner in command.commands.items():
        yield from _options(f"{place}.{name}" if place else name, inner)


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
            owners = [f"[{place}{owner}]" for owner, own in _options("", command) if commands and own == name]
            if owners:
                where = " or ".join(owners[:3])
                raise typer.BadParameter(f"{path}: {place}{key} is an option: put it below {where}")
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
