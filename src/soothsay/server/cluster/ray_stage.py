"""Stages of a model as Ray actors: each runs some layers for an engine, on any machine of the cluster.

Needs the extra `soothsay[ray]`.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import ray

from soothsay.errors import ModelError
from soothsay.handshake import Number, Switchboard, call
from soothsay.model.pipeline.pipeline import RemoteStage
from soothsay.server.cluster.ray_engine import end_of, first_call


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
            pipe = first_call(switchboard, number, run, self.cores)
            if pipe is None:
                raise ModelError(f"the actor of a stage ended before it had layers: {end_of(run)}")
        return RemoteStage(pipe, f"Ray actor, {pipe.recv()}")


class StageActor:
    """The process of a stage, as Ray starts it. Ray ends it when `run` has returned: nobody refers to it."""

    def run(self, number: Number, cores: int) -> None:
        """Call the engine, and run layers for it until it hangs up."""
        from soothsay.model.pipeline.stage_process import serve_engine
        from soothsay.server.engines.engine_process import pin

        pipe = call(*number)
        pin(cores)
        pipe.send(f"process {os.getpid()} on {platform.node()}")
        serve_engine(pipe)
