"""Options that say how many engines there are and where they run, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soothsay.errors import SoothsayError

if TYPE_CHECKING:
    from soothsay.model.pipeline.pipeline import Stages
    from soothsay.server.fleet.scaling import Bounds

REPLICAS = "Many engines"
"""The panel of these options in `--help`."""

ReplicasOption = Annotated[
    str,
    typer.Option(
        "--replicas",
        metavar="N or MIN:MAX",
        help="Number of engines behind this port; with bounds, it follows the load. An answer goes on at "
        "another engine if its own one ends.",
        rich_help_panel=REPLICAS,
    ),
]

ReplicaCoresOption = Annotated[
    int | None,
    typer.Option(
        "--replica-cores",
        min=1,
        show_default="the cores of this machine, shared equally",
        help="Physical cores of each engine, which are its own.",
        rich_help_panel=REPLICAS,
    ),
]

RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        show_default="no Ray: all engines run on this machine",
        help="Run the engines on a Ray cluster: 'auto', HOST:PORT, or 'local' to start one here.",
        rich_help_panel=REPLICAS,
    ),
]

StagesOption = Annotated[
    int,
    typer.Option(
        "--stages",
        min=1,
        help="Number of processes that share each engine's layers: of this machine, or Ray actors.",
        rich_help_panel=REPLICAS,
    ),
]

StageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stage",
        metavar="HOST:PORT",
        help="Where 'soothsay stage' runs, which gets layers of a model that is too large for this "
        "machine. Can be repeated.",
        rich_help_panel=REPLICAS,
    ),
]

StageKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--stage-key",
        dir_okay=False,
        help="File with the key of these stages.",
        show_default=False,
        rich_help_panel=REPLICAS,
    ),
]

PortableOption = Annotated[
    bool,
    typer.Option(
        "--portable",
        help="Compute with instructions that all processors of the family have, so that engines on "
        "unlike machines give equal answers. Slower.",
        rich_help_panel=REPLICAS,
    ),
]


def parse_bounds(replicas: str) -> Bounds:
    """The bounds of the number of engines. Raises `typer.BadParameter`."""
    from soothsay.server.fleet.scaling import Bounds

    try:
        return Bounds.parse(replicas)
    except SoothsayError as error:
        raise typer.BadParameter(f"--replicas: {error}") from None


def parse_stages(count: int, addresses: Sequence[str] | None, key: Path | None, replicas: int) -> Stages:
    """The processes that share an engine's layers. Raises `typer.BadParameter`, or `SoothsayError`."""
    if not addresses:
        return count
    from soothsay.model.pipeline.pipeline import StageAddress, read_key

    if count > 1 or replicas > 1:
        raise typer.BadParameter("--stage serves one engine; leave out --stages and --replicas")
    if key is None:
        raise typer.BadParameter("--stage needs --stage-key FILE, as 'soothsay stage' does")
    secret = read_key(key)
    return [StageAddress.parse(address, secret) for address in addresses]
