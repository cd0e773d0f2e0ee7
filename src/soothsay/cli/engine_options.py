"""Groups of options that make engines: what `LLM` is told, how many engines there are, where they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from soothsay.config import EngineConfig
from soothsay.errors import SoothsayError
from soothsay.options import ModelOptions, option

if TYPE_CHECKING:
    from soothsay.model.pipeline.pipeline import Stages
    from soothsay.server.fleet.engine_fleet import Bounds
    from soothsay.server.placement import Placement


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """How an engine of `serve` or `batch` runs its model."""

    kv_tokens: int | None = option(
        None, "Size of the KV cache in tokens, for all requests together.", min=1, show_default="by memory"
    )
    keep: Path | None = option(
        None,
        "A directory that keeps what drafters learn across restarts, apart for each tenant. It "
        "holds what users wrote. Only this user of the machine can read it.",
        file_okay=False,
        show_default="forget it at the end",
    )
    learn: float = option(
        0.0,
        "Share of a core's time, such as 0.1, in which trained drafters learn from answers.",
        min=0,
        max=1,
    )
    max_running: int = option(
        EngineConfig.max_requests, "Limit of answers in one step.", min=1, panel="Limits"
    )

    def for_llm(self) -> dict[str, Any]:
        """The options as arguments of `LLM`."""
        options = asdict(self)
        return {"max_requests": options.pop("max_running"), **options}


@dataclass(frozen=True)
class PlacementOptions:
    """How many engines `serve` has, and where they and their stages run."""

    PANEL = "Many engines"

    replicas: str = option(
        "1",
        "Number of engines behind this port. With bounds, it follows the load. If an engine dies, "
        "another one continues its answers.",
        metavar="N or MIN:MAX",
    )
    replica_cores: int | None = option(
        None,
        "Physical cores of each engine, which are its own.",
        min=1,
        show_default="the cores of this machine, shared equally",
    )
    ray_address: str | None = option(
        None,
        "Run the engines on a Ray cluster: 'auto', HOST:PORT, or 'local' to start one here.",
        show_default="no Ray: all engines run on this machine",
    )
    stages: int = option(
        1, "Number of processes that share each engine's layers: of this machine, or Ray actors.", min=1
    )
    stage: list[str] | None = option(
        None,
        "The address of a 'soothsay stage', which runs a part of the layers of a model that is too "
        "large for this machine. Can be repeated.",
        metavar="HOST:PORT",
    )
    stage_key: Path | None = option(
        None, "File with the key of these stages.", dir_okay=False, show_default=False
    )
    portable: bool = option(
        False,
        "Use only instructions that all processors of the family have, so that engines on "
        "different machines give equal answers. Slower.",
    )

    def bounds(self) -> Bounds:
        """The bounds of the number of engines. Raises `typer.BadParameter`."""
        from soothsay.server.fleet.engine_fleet import Bounds

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
        """Where the engines run, at most `replicas` of them."""
        from soothsay.server.engines.engine_process import PORTABLE
        from soothsay.server.placement import Placement

        return Placement(
            replicas,
            self.replica_cores,
            self.ray_address,
            environment=PORTABLE if self.portable else {},
            stages=shared if isinstance(shared, int) else len(shared) + 1,
        )
