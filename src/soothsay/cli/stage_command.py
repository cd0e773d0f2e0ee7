"""`soothsay stage`: runs layers of a model for an engine on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from soothsay.options import REQUIRED, argument, option


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Run layers for engines on other machines, one engine after the other, until it is stopped.

    The engine says which model and which layers. The model must have the same name or path here.
    """

    listen: str = argument(REQUIRED, "The address to listen on. Port 0: any free port.", metavar="HOST:PORT")
    key: Path = option(REQUIRED, "File with the key that engines must have.", dir_okay=False)

    def run(self) -> None:
        """Listen for engines."""
        from soothsay.model.pipeline.pipeline import read_key
        from soothsay.model.pipeline.stage_process import listen

        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 2**16:
            raise typer.BadParameter(f"{self.listen!r} is not HOST:PORT")
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

        def tell(address: str, number: int) -> None:
            console.print(f"waiting for engines at {address}:{number}")

        listen(host.strip("[]"), int(port), read_key(self.key), tell)
