"""Makes commands of dataclasses: fields are options, the docstring is the help, `run` is the work.

A field that is a dataclass itself is a group. Its fields are options of the command, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any, Protocol, get_type_hints

import typer

from soothsay.options import DECLARED, REQUIRED, Declaration


class Command(Protocol):
    """A command with its options. A group, or a command, may name the `PANEL` of the help for its options."""

    def run(self) -> None:
        """Do the work."""


def add_commands(app: typer.Typer, commands: Mapping[str, type[Command]]) -> None:
    """Add commands by their names."""
    for name, command in commands.items():
        app.command(name)(as_function(command))


def as_function(command: type[Command]) -> Callable[..., None]:
    """A command as a function that typer understands. Raises `ValueError` if two options have one name."""
    shown = list(_parameters(command))

    def run(**options: Any) -> None:
        _made(command, options).run()

    run.__doc__ = command.__doc__
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run


def _parameters(group: type[Any]) -> Iterator[Parameter]:
    types = get_type_hints(group)
    for field in fields(group):
        declared: Declaration | None = field.metadata.get(DECLARED)
        if declared is None:
            yield from _parameters(types[field.name])
            continue
        settings: dict[str, Any] = {"help": declared.help, **declared.settings}
        if panel := settings.pop("panel", None) or getattr(group, "PANEL", None):
            settings["rich_help_panel"] = panel
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
