"""`soothsay stage`: runs layers of a model for an engine on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def stage(
    listen: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The address to listen on. Port 0: any free port.")
    ],
    key: Annotated[
        Path, typer.Option("--key", dir_okay=False, help="File with the key that engines must have.")
    ],
) -> None:
    """Run layers for engines on other machines, one engine after the other, until it is stopped.

    The engine says which model and which layers. The model must have the same name or path here.
    """
    from soothsay.model.pipeline.pipeline import read_key
    from soothsay.model.pipeline.stage_process import listen as listen_for_engines

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise typer.BadParameter(f"{listen!r} is not HOST:PORT")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def tell(address: str, number: int) -> None:
        console.print(f"waiting for engines at {address}:{number}")

    listen_for_engines(host.strip("[]"), int(port), read_key(key), tell)
