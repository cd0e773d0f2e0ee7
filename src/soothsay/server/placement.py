"""Where engines run: in processes of this machine, as forks of one process, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from soothsay.errors import SoothsayError
from soothsay.processors import granted_processors
from soothsay.server.engines.engine_messages import Engine
from soothsay.server.engines.engine_process import EngineProcess
from soothsay.server.engines.nursery import Nursery

if TYPE_CHECKING:
    from soothsay.llm import LLM
    from soothsay.model.pipeline.pipeline import Stages

NO_RAY = "Ray is not installed: pip install 'soothsay[ray]'"


@dataclass(frozen=True, slots=True)
class Placement:
    """How many engines there are at most, and where they run."""

    replicas: int = 1
    cores: int | None = None  # physical ones of each engine; None: an equal share of this machine's
    ray_address: str | None = None  # of a cluster; None: they run on this machine
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of their processes
    stages: int = 1  # processes that share an engine's layers; a fork would share them too

    @property
    def cores_of_each(self) -> int | None:
        """Physical cores that are an engine's own; None: the only one shares all cores."""
        if self.cores is None and self.replicas == 1 and self.ray_address is None:
            return None
        return self.cores or max(granted_processors() // self.replicas, 1)


def stages_on_ray(count: int, cores: int) -> Stages:
    """The processes that share an engine's layers, as actors of the engine's cluster.

    Args:
        count: the engine's own process included.
        cores: physical ones of each.

    Raises `SoothsayError` if Ray is not installed.
    """
    if count == 1:
        return 1
    try:
        from soothsay.server.cluster.ray_stage import RayStage
    except ImportError:
        raise SoothsayError(NO_RAY) from None
    return [RayStage(cores)] * (count - 1)


@contextmanager
def engines(factory: Callable[..., LLM], placement: Placement) -> Iterator[Callable[[], Engine]]:
    """Makes engines while the block runs.

    Args:
        factory: makes the `LLM` of an engine. It takes the number of `cores` that are its own, or None, and
            the limit of `engines` that share the machine's memory. It must be picklable.
        placement: where they run.

    Raises `SoothsayError` if a Ray cluster is asked for and Ray is not installed.
    """
    cores, environment = placement.cores_of_each, placement.environment
    elsewhere = placement.ray_address not in (None, "local")  # on machines that nobody knows
    factory = partial(factory, engines=1 if elsewhere else placement.replicas)
    own = partial(factory, cores=cores)
    if placement.ray_address is not None:
        try:
            from soothsay.server.cluster.ray_engine import Cluster
        except ImportError:
            raise SoothsayError(NO_RAY) from None
        each = cores or 1
        total = each * placement.replicas * placement.stages
        with Cluster(placement.ray_address, own, each, environment, total) as cluster:
            yield cluster.engine
    elif sys.platform == "linux" and placement.replicas > 1 and placement.stages == 1:
        with Nursery(partial(factory, cores=None), cores or 1, environment) as nursery:
            yield nursery.engine
    else:
        yield partial(EngineProcess, own, environment)
