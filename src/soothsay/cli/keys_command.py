"""`soothsay keys add | list | remove`: API keys of a server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.table import Table

from soothsay.cli.command_classes import add_commands
from soothsay.cli.terminal import say
from soothsay.options import argument, flag, option, optional, shared


@dataclass(frozen=True)
class Grants:
    """What a key allows, by the names of the fields of `Key`."""

    requests_per_minute: int | None = optional("no limit", min=1)
    """Limit of requests a minute."""

    tokens_per_minute: int | None = optional("no limit", min=1)
    """Limit of tokens a minute, in prompts and answers."""

    running: int | None = optional("no limit", min=1)
    """Limit of answers at once."""

    priority: int = option(0)
    """The lowest, most urgent priority that the key may ask for."""

    trace: bool = flag()
    """Allow requests with speculation.trace."""

    operator: bool = flag()
    """Allow to read /metrics and /slots, which count the requests of all keys, and to use /replicas."""


@dataclass(frozen=True, kw_only=True)
class ListKeys:
    """Show the names of all keys, their limits and their permissions."""

    file: Path = option(Path("api-keys.json"), "-f", dir_okay=False)
    """The file with the hashes of the keys."""

    def run(self) -> None:
        """Print a table of the keys."""
        from soothsay.server.access.api_keys import read_keys

        table = Table("name", "requests/min", "tokens/min", "at once", "priority", "may use", box=None)
        for key in read_keys(self.file):
            limits = (key.requests_per_minute, key.tokens_per_minute, key.running)
            told = ("any" if limit is None else f"{limit:,}" for limit in limits)
            allowed = [name for name in ("trace", "operator") if getattr(key, name)]
            table.add_row(key.name, *told, str(key.priority), ", ".join(allowed) or "-")
        say(table)


@dataclass(frozen=True, kw_only=True)
class AddKey:
    """Make a key and print it. It cannot be printed again: the file holds only its hash."""

    name: str = argument()
    """A name for the key. The log shows it."""

    file: Path = shared(ListKeys, "file")
    grants: Grants

    def run(self) -> None:
        """Add the key."""
        from soothsay.server.access.api_keys import add_key

        print(add_key(self.file, self.name, **asdict(self.grants)))


@dataclass(frozen=True, kw_only=True)
class RemoveKey:
    """Remove a key. A running server notices the change."""

    name: str = argument()
    """The name of the key."""

    file: Path = shared(ListKeys, "file")

    def run(self) -> None:
        """Remove the key."""
        from soothsay.server.access.api_keys import remove_key

        remove_key(self.file, self.name)


keys = typer.Typer(help="API keys of a server.", no_args_is_help=True)
add_commands(keys, {"add": AddKey, "list": ListKeys, "remove": RemoveKey})
