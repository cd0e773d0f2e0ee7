"""`soothsay keys add | list | remove`: API keys of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

keys = typer.Typer(help="API keys of a server.", no_args_is_help=True)

FileOption = Annotated[
    Path, typer.Option("--file", "-f", dir_okay=False, help="The file with the hashes of the keys.")
]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="A name for the key. The log shows it.")],
    file: FileOption = Path("api-keys.json"),
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute", min=1, show_default="no limit", help="Limit of requests a minute."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-minute",
            min=1,
            show_default="no limit",
            help="Limit of tokens a minute, in prompts and answers.",
        ),
    ] = None,
    running: Annotated[
        int | None,
        typer.Option("--running", min=1, show_default="no limit", help="Limit of answers at once."),
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", help="The lowest, most urgent priority that the key may ask for.")
    ] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Allow requests with speculation.trace.")] = False,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator",
            help="Allow to read /metrics and /slots, which count the requests of all keys, "
            "and to use /replicas.",
        ),
    ] = False,
) -> None:
    """Make a key and print it. It cannot be printed again: the file holds only its hash."""
    from soothsay.server.access.api_keys import add_key

    secret = add_key(
        file,
        name,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        running=running,
        priority=priority,
        trace=trace,
        operator=operator,
    )
    print(secret)


@keys.command(name="list")
def show(file: FileOption = Path("api-keys.json")) -> None:
    """Show the names of all keys, their limits and their permissions."""
    from soothsay.server.access.api_keys import read_keys

    table = Table("name", "requests/min", "tokens/min", "at once", "priority", "may use", box=None)
    for key in read_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute, key.running)
        told = ("any" if limit is None else f"{limit:,}" for limit in limits)
        allowed = [name for name in ("trace", "operator") if getattr(key, name)]
        table.add_row(key.name, *told, str(key.priority), ", ".join(allowed) or "-")
    Console(highlight=False, markup=False).print(table)


@keys.command()
def remove(
    name: Annotated[str, typer.Argument(help="The name of the key.")],
    file: FileOption = Path("api-keys.json"),
) -> None:
    """Remove a key. A running server notices the change."""
    from soothsay.server.access.api_keys import remove_key

    remove_key(file, name)
