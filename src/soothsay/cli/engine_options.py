"""Groups of options that make engines: what `LLM` is told, how many engines there are, where they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soothsay.cli.options import MaxRunningOption, ModelOptions
from soothsay.config import EngineConfig
from soothsay.errors import SoothsayError

if TYPE_CHECKING:
    from soothsay.model.pipeline.pipeline import Stages
    from soothsay.server.fleet.scaling import Bounds
    from soothsay.server.placement import Placement

_replicas = partial(typer.Option, rich_help_panel="Many engines")

RayAddressOption = Annotated[
    str | None,
    _replicas(
        "--ray-address",
        show_default="no Ray: all engines run on this machine",
        help="Run the engines on a Ray cluster: 'auto', HOST:PORT, or 'local' to start one here.",
    ),
]


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """How an engine of `serve` or `batch` runs its model."""

    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="by memory", help="Size of the KV cache in tokens, for all requests together."
        ),
    ] = None
    keep: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="forget it at the end",
            help="A directory that keeps what drafters learn across restarts, apart for each tenant. It "
            "holds what users wrote. Only this user of the machine can read it.",
        ),
    ] = None
    learn: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of a core's time, such as 0.1, in which trained drafters learn from answers.",
        ),
    ] = 0.0
    max_running: MaxRunningOption = EngineConfig.max_requests

    def for_llm(self) -> dict[str, Any]:
        """The options as arguments of `LLM`."""
        options = asdict(self)
        return {"max_requests": options.pop("max_running"), **options}


@dataclass(frozen=True)
class PlacementOptions:
    """How many engines `serve` has, and where they and their stages run."""

    replicas: Annotated[
        str,
        _replicas(
            metavar="N or MIN:MAX",
            help="Number of engines behind this port. With bounds, it follows the load. If an engine dies, "
            "another one continues its answers.",
        ),
    ] = "1"
    replica_cores: Annotated[
        int | None,
        _replicas(
            min=1,
            show_default="the cores of this machine, shared equally",
            help="Physical cores of each engine, which are its own.",
        ),
    ] = None
    ray_address: RayAddressOption = None
    stages: Annotated[
        int,
        _replicas(
            min=1, help="Number of processes that share each engine's layers: of this machine, or Ray actors."
        ),
    ] = 1
    stage: Annotated[
        list[str] | None,
        _replicas(
            metavar="HOST:PORT",
            help="The address of a 'soothsay stage', which runs a part of the layers of a model that is too "
            "large for this machine. Can be repeated.",
        ),
    ] = None
    stage_key: Annotated[
        Path | None, _replicas(dir_okay=False, help="File with the key of these stages.", show_default=False)
    ] = None
    portable: Annotated[
        bool,
        _replicas(
            "--portable",
            help="Use only instructions that all processors of the family have, so that engines on "
            "different machines give equal answers. Slower.",
        ),
    ] = False

    def bounds(self) -> Bounds:
        """The bounds of the number of engines. Raises `typer.BadParameter`."""
        from soothsay.server.fleet.scaling import Bounds

        try:
            bounds = Bounds.parse(self.replicas)
        except SoothsayError as error:
            raise typer.BadParameter(f"--replicas: {error}") from None
        if self.replica_cores is None and self.ray_address not in (None, "local"):
            raise typer.BadParameter(
                "--ray-address needs --replica-cores N: machines of a cluster may differ"
            )
        return bounds

    def shared(self, replicas: int) -> Stages:
        """The processes that share an engine's layers. Raises `typer.BadParameter`, or `SoothsayError`."""
        if not self.stage:
            return self.stages if self.ray_address is None else self._on_ray()
        from soothsay.model.pipeline.pipeline import StageAddress, read_key

        if self.stages > 1 or replicas > 1:
            raise typer.BadParameter("--stage serves one engine; leave out --stages and --replicas")
        if self.stage_key is None:
            raise typer.BadParameter("--stage needs --stage-key FILE, as 'soothsay stage' does")
        secret = read_key(self.stage_key)
        return [StageAddress.parse(address, secret) for address in self.stage]

    def _on_ray(self) -> Stages:
        from soothsay.server.placement import stages_on_ray

        return stages_on_ray(self.stages, self.replica_cores or 1)

    def placement(self, replicas: int, shared: Stages) -> Placement:
        """Where at most so many engines run."""
        from soothsay.server.engines.engine_process import PORTABLE
        from soothsay.server.placement import Placement

        return Placement(
            replicas,
            self.replica_cores,
            self.ray_address,
            environment=PORTABLE if self.portable else {},
            stages=shared if isinstance(shared, int) else len(shared) + 1,
        )
