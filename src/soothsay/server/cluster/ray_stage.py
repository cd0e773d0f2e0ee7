"""Stages of a model as Ray actors: each runs some layers for an engine, on any machine of the cluster.

Needs the extra `soothsay[ray]`.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from soothsay.errors import ModelError
from soothsay.model.pipeline.remote_stage import RemoteStage
from soothsay.server.cluster.switchboard import Number, Switchboard, call

log = logging.getLogger("soothsay.server")

PATIENCE = 10.0
"""Seconds after which the log says that a stage still waits for a machine."""


@dataclass(frozen=True, slots=True)
class RayStage:
    """An actor that gets layers, for `LLM(model, stages=[RayStage(), ...])`. It is a `StagePlace`.

    The process of the `LLM` must have joined a cluster. Engines on Ray have joined one.
    """

    cores: int = 1  # physical ones, its own

    def open(self) -> RemoteStage:
        """Start an actor and wait until it has called. It ends when the stage is closed.

        Raises `ModelError` if the actor ends before.
        """
        with Switchboard(ray.util.get_node_ip_address()) as switchboard:
            number = switchboard.expect()
            actor = ray.remote(StageActor).options(num_cpus=self.cores, max_restarts=0).remote()
            run = actor.run.remote(number, self.cores)
            begin, told = time.monotonic(), False
            while (pipe := switchboard.answer(number, 0.1)) is None:
                if ray.wait([run], timeout=0)[0]:
                    raise ModelError(f"the actor of a stage ended before it had layers: {_reason(run)}")
                if not told and time.monotonic() - begin > PATIENCE:
                    told = True
                    log.warning("stage waits for a machine", extra={"cores": self.cores})
        return RemoteStage(pipe, f"Ray actor, {pipe.recv()}")


def _reason(run: ray.ObjectRef) -> str:
    """Why an actor has ended."""
    try:
        ray.get(run, timeout=1.0)
    except RayError as error:
        return str(error)
    return "it has returned"


class StageActor:
    """The process of a stage, as Ray starts it. Ray ends it when `run` has returned: nobody refers to it."""

    def run(self, number: Number, cores: int) -> None:
        """Call the engine, and run layers for it until it hangs up."""
        from soothsay.model.pipeline.stage_process import serve_engine
        from soothsay.server.process import pin

        pipe = call(number)
        pin(cores)
        pipe.send(f"process {os.getpid()} on {platform.node()}")
        serve_engine(pipe)
