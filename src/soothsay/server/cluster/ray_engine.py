"""Engines as Ray actors. Ray finds a machine for each and starts it; messages go through a connection.

Needs the extra `soothsay[ray]`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError

from soothsay.errors import SoothsayError
from soothsay.handshake import Number, Switchboard, call
from soothsay.processors import granted_processors
from soothsay.server.engines.engine_messages import EngineUpdate, Incoming, Loaded, Received
from soothsay.server.engines.engine_process import read_messages, write_messages
from soothsay.server.http.json_log import log

if TYPE_CHECKING:
    from soothsay.llm import LLM

PATIENCE = 10.0
"""Seconds after which the log says that an actor still waits for a machine."""


def first_call(
    switchboard: Switchboard,
    number: Number,
    run: ray.ObjectRef,
    cores: int,
    wanted: Callable[[], bool] = lambda: True,
) -> Connection | None:
    """The connection of an actor that calls a number; None if it ends before.

    Args:
        switchboard: expects the number.
        number: which the actor has got.
        run: the actor's task, which ends with it.
        cores: that the actor needs.
        wanted: whether to wait any longer.
    """
    begin, told = time.monotonic(), False
    while wanted():
        if (pipe := switchboard.answer(number, 0.1)) is not None:
            return pipe
        if ray.wait([run], timeout=0)[0]:
            return None
        if not told and time.monotonic() - begin > PATIENCE:
            told = True
            log.warning("waiting for a machine of the cluster with free cores: %d", cores)
    return None


def end_of(run: ray.ObjectRef) -> str:
    """Why an actor has ended."""
    try:
        ray.get(run, timeout=1.0)
    except RayError as error:
        return str(error)
    return "it has returned"


LOCAL = "local"
"""The address of a cluster that is started on this machine and ends with the server."""


class Cluster:
    """A Ray cluster with room for engines. As a context manager, it joins or starts the cluster.

    Args:
        address: of the cluster, as for `ray.init`; `"local"`: start one on this machine. In a process that
            Ray has started, its cluster is used whatever this is.
        factory: makes the `LLM` in an engine's process. It must be picklable.
        cores: of each engine.
        environment: variables of the engines' processes.
        total: cores that a cluster started here must have at least.

    Raises `SoothsayError` on entry if there is no cluster at the address.
    """

    def __init__(
        self,
        address: str,
        factory: Callable[[], LLM],
        cores: int = 1,
        environment: Mapping[str, str] = MappingProxyType({}),
        total: int = 1,
    ):
        if address.startswith("ray://"):
            problem = "a Ray client cannot serve, since engines call the server"
            hint = "run the command on a machine of the cluster, with --ray-address auto"
            raise SoothsayError(f"{problem}: {hint}")
        self.address, self.factory, self.cores, self.environment = address, factory, cores, environment
        self._total = total

    def __enter__(self) -> Self:
        self._owned = not ray.is_initialized()
        if self._owned:
            try:
                if self.address == LOCAL:
                    ray.init(
                        LOCAL,
                        num_cpus=max(granted_processors(), self._total),
                        include_dashboard=False,
                        logging_level=logging.WARNING,
                        _system_config={"worker_niceness": 0},  # else anything else here goes first
                    )
                else:
                    ray.init(self.address, logging_level=logging.WARNING)
            except (ConnectionError, RayError, ValueError) as error:
                raise SoothsayError(f"there is no Ray cluster at {self.address!r}: {error}") from None
        host = "127.0.0.1" if self.address == LOCAL and self._owned else ray.util.get_node_ip_address()
        self.switchboard = Switchboard(host)
        self.switchboard.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.switchboard.__exit__(*error)
        if self._owned:
            ray.shutdown()

    def engine(self) -> RayEngine:
        """An engine that has not started."""
        return RayEngine(self)


class RayEngine:
    """An engine in a Ray actor. It is an `Engine`, and documents no more than that.

    Args:
        cluster: where the actor runs.
    """

    exit_code = None

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self.pid: int | None = None

    def start(self) -> None:
        """Ask the cluster for an actor, which begins to load the model and then calls."""
        cluster = self._cluster
        self.pid = None
        self._ended = threading.Event()
        self._outbox: SimpleQueue[Incoming | None] = SimpleQueue()
        self._pipe: Connection | None = None
        self._number = cluster.switchboard.expect()
        actor = ray.remote(EngineActor).options(
            num_cpus=cluster.cores,
            max_restarts=0,  # the fleet starts another one
            runtime_env={"env_vars": dict(cluster.environment)} if cluster.environment else None,
        )
        self._actor = actor.remote()
        self._run = self._actor.run.remote(cluster.factory, self._number)

    def wait(self) -> Loaded:
        """See `Engine`."""
        pipe = self._connected()
        received: Any = None
        with suppress(EOFError, OSError):
            received = None if pipe is None else pipe.recv()
        if isinstance(received, Loaded):
            return received
        raise received or SoothsayError(f"the engine's actor ended while it was loading: {end_of(self._run)}")

    def listen(self, receive: Callable[[Received], None]) -> None:
        """See `Engine`."""
        threading.Thread(target=self._listen, args=(receive,), name="ray-engine", daemon=True).start()

    def send(self, message: Incoming) -> None:
        """See `Engine`."""
        self._outbox.put(message)

    def kill(self) -> None:
        """See `Engine`."""
        with suppress(RayError, ValueError):  # it may have ended, and its cluster too
            ray.kill(self._actor)

    def end(self) -> None:
        """See `Engine`."""
        if not self._ended.is_set():
            self._ended.set()
            self._outbox.put(None)
            self._cluster.switchboard.forget(self._number)
            if ray.is_initialized():
                self.kill()

    def _listen(self, receive: Callable[[Received], None]) -> None:
        pipe = self._connected()
        if pipe is None:
            receive(None)
            return

        def receive_here(received: Received) -> None:
            if isinstance(received, EngineUpdate):  # machines have clocks of their own
                received = replace(received, at=time.monotonic())
            receive(received)

        read_messages(pipe, receive_here)
        pipe.close()

    def _connected(self) -> Connection | None:
        """Wait for the connection; None if the actor has ended before."""
        if self._pipe is None:
            cluster = self._cluster
            pipe = first_call(
                cluster.switchboard, self._number, self._run, cluster.cores, lambda: not self._ended.is_set()
            )
            if pipe is not None:
                with suppress(EOFError, OSError):
                    self.pid = pipe.recv()
                    self._pipe = pipe
                    threading.Thread(target=write_messages, args=(pipe, self._outbox), daemon=True).start()
            if self._pipe is None and not self._ended.is_set():
                log.error("actor ended", extra={"reason": end_of(self._run)})
        return self._pipe


class EngineActor:
    """The process of an engine, as Ray starts it."""

    def run(self, factory: Callable[[], LLM], number: Number) -> None:
        """Call the server, load the model, and step its engine until the server hangs up."""
        from soothsay.server.engines.worker import run_worker

        pipe = call(*number)
        pipe.send(os.getpid())
        run_worker(factory, pipe)
