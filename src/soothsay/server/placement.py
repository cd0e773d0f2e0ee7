"""Where engines run: in processes of this machine, as forks of one process, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
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
def engines(
    factory: Callable[..., LLM],
    replicas: int,
    cores: int | None = None,
    ray_address: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    stages: int = 1,
) -> Iterator[Callable[[], Engine]]:
    """Makes engines while the block runs.

    Args:
        factory: makes the `LLM` of an engine. It takes the number of `cores` that are its own, or None, and
            the limit of `engines` that share the machine's memory. It must be picklable.
        replicas: how many engines there are at most.
        cores: physical ones of each engine. None: an equal share of this machine's; an only one shares all.
        ray_address: of the cluster on which they run. None: they run on this machine.
        environment: variables of their processes.
        stages: processes that share an engine's layers. A fork would share them too.

    Raises `SoothsayError` if a Ray cluster is asked for and Ray is not installed.
    """
    if cores is None and (replicas > 1 or ray_address is not None):
        cores = max(granted_processors() // replicas, 1)
    elsewhere = ray_address not in (None, "local")  # on machines that nobody knows
    factory = partial(factory, engines=1 if elsewhere else replicas)
    own = partial(factory, cores=cores)
    if ray_address is not None:
        try:
            from soothsay.server.cluster.ray_engine import Cluster
        except ImportError:
            raise SoothsayError(NO_RAY) from None
        each = cores or 1
        with Cluster(ray_address, own, each, environment, each * replicas * stages) as cluster:
            yield cluster.engine
    elif sys.platform == "linux" and replicas > 1 and stages == 1:
        with Nursery(partial(factory, cores=None), cores or 1, environment) as nursery:
            yield nursery.engine
    else:
        yield partial(EngineProcess, own, environment)
