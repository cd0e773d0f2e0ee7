"""Makes commands of dataclasses: fields are options, the docstring is the help, `run` is the work.

A field that is a dataclass itself is a group. Its fields are options of the command, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, Signature
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from soothsay.errors import our_words
from soothsay.options import DECLARED, REQUIRED, Declaration, help_of

MOST = 10
"""Options that the help shows first. Further ones without a panel are in `MORE`."""

MORE = "More options"

LONGEST = 1000
"""Limit of characters of a command's line in a list, which is broken where the terminal ends."""


class Command(Protocol):
    """A command with its options. A group, or a command, may name the `PANEL` of the help for its options."""

    def run(self) -> None:
        """Do the work."""


class _Documented(TyperCommand):
    """A command whose fields say what its options are, with `write_options`."""

    made_of: ClassVar[type[Command]]

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, with the text for the help."""
        texts, options = dict(_helps(self.made_of)), super().get_params(ctx)
        for one in options:
            one.help = texts.get(str(one.name), one.help)  # type: ignore[attr-defined]
        return options

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence, for a list of commands. It is not cut."""
        return super().get_short_help_str(LONGEST)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. The error for an unknown option offers names that are close without dashes, or
        says that the option goes before the command.

        That for a wrong value is in our words, and says where it is from, if not from the command line.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # Click's, which is a part of some versions of typer
            before = [name for one in ctx.find_root().command.params for name in one.opts]
            if (name := getattr(error, "option_name", None)) in before:
                error.message += f". It goes before the command: {ctx.find_root().info_name} {name} ..."  # type: ignore[attr-defined]
            elif offered := getattr(error, "possibilities", None):
                bare = {one.lstrip("-"): one for one in offered}
                meant = get_close_matches(error.option_name.lstrip("-"), bare)  # type: ignore[attr-defined]
                error.possibilities = [bare[one] for one in meant]  # type: ignore[attr-defined]
            if (own := getattr(error, "param", None)) is not None:
                error.message = our_words(error.message)  # type: ignore[attr-defined]
                variable = f"the variable {ctx.auto_envvar_prefix}_{own.name.upper()}"
                places = {"ENVIRONMENT": variable, "DEFAULT_MAP": "the file of --config"}
                if place := places.get(getattr(ctx.get_parameter_source(own.name), "name", "")):
                    error.message += f" (from {place})"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all options."""
        write_options(self, ctx, formatter)


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the options of a command by panel, one below the other, so that no name is cut.

    Variables are not named: there is a rule for all of them.
    """
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for one in command.get_params(ctx):
        one.show_envvar = False
        is_argument = one.param_type_name == "argument"
        panel = getattr(one, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        if record := one.get_help_record(ctx):
            shown = one.metavar if is_argument else record[0]
            panels.setdefault(panel, []).append((shown, record[1]))
    for panel, records in panels.items():
        if records:
            with formatter.section(typer.style(panel, bold=True)):
                formatter.write_dl(records, col_max=24)


def _metavar(kind: Any) -> str | None:
    """What stands for a value of a type in the help; None: what typer shows."""
    inner = [one for one in get_args(kind) if one is not NoneType]
    if inner and get_origin(kind) is not Literal:
        return _metavar(inner[0])
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(kind)


def add_commands(app: typer.Typer, commands: Mapping[str, type[Command]]) -> None:
    """Add commands by their names."""
    for name, command in commands.items():
        kind = type(command.__name__, (_Documented,), {"made_of": command})
        app.command(name, cls=kind)(as_function(command))


def _helps(group: type[Any]) -> Iterator[tuple[str, str]]:
    """The name and the help of each option of a group. It reads the source of classes."""
    types = get_type_hints(group)
    for field in fields(group):
        if DECLARED in field.metadata:
            yield field.name, help_of(group, field.name)
        else:
            yield from _helps(types[field.name])


def as_function(command: type[Command]) -> Callable[..., None]:
    """A command as a function that typer understands. Raises `ValueError` if two options have one name."""
    shown = list(_parameters(command, count()))

    def run(**options: Any) -> None:
        _made(command, options).run()

    run.__doc__ = command.__doc__
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run


def _parameters(group: type[Any], firsts: Iterator[int]) -> Iterator[Parameter]:
    """The parameters of a group. `firsts` counts the options that have no panel."""
    types = get_type_hints(group)
    for field in fields(group):
        declared: Declaration | None = field.metadata.get(DECLARED)
        if declared is None:
            yield from _parameters(types[field.name], firsts)
            continue
        settings = {"metavar": _metavar(types[field.name]), **declared.settings}
        panel = settings.pop("panel", getattr(group, "PANEL", None))
        if not (panel or declared.is_argument) and next(firsts) >= MOST:
            panel = MORE
        settings["rich_help_panel"] = panel or None
        if declared.is_argument:
            settings["metavar"] = declared.settings.get("metavar", field.name.upper())
        names, long = declared.names, f"--{field.name.replace('_', '-')}"
        if not declared.is_argument and not any(name.startswith("--") for name in names):
            names = long, *names
        shown = (typer.Argument if declared.is_argument else typer.Option)(*names, **settings)
        default = Parameter.empty if field.default is REQUIRED else field.default
        kind: Any = types[field.name]
        place, annotation = Parameter.KEYWORD_ONLY, Annotated[kind, shown]
        yield Parameter(field.name, place, default=default, annotation=annotation)


def _made(group: type[Any], options: Mapping[str, Any]) -> Any:
    """An object of a group. It takes from `options` what is its own."""
    types, values = get_type_hints(group), dict[str, Any]()
    for field in fields(group):
        is_option = DECLARED in field.metadata
        values[field.name] = options[field.name] if is_option else _made(types[field.name], options)
    return group(**values)
