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
) -> None:
    """Make a key and print it. It cannot be printed again: the file holds only its hash."""
    from soothsay.server.api_keys import add_key

    print(add_key(file, name, requests, tokens))


@keys.command(name="list")
def show(file: FileOption = Path("api-keys.json")) -> None:
    """Show the names of all keys, and their limits."""
    from soothsay.server.api_keys import read_keys

    table = Table("name", "requests a minute", "tokens a minute", box=None)
    for key in read_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute)
        table.add_row(key.name, *("no limit" if limit is None else f"{limit:,}" for limit in limits))
    Console(highlight=False, markup=False).print(table)


@keys.command()
def remove(
    name: Annotated[str, typer.Argument(help="The name of the key.")],
    file: FileOption = Path("api-keys.json"),
) -> None:
    """Remove a key. A running server notices the change."""
    from soothsay.server.api_keys import remove_key

    remove_key(file, name)
