"""Runs servers: in a thread on a free port with the engine in a process, or as a command."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from commands import WARM, Command
from openai import OpenAI

from soothsay import LLM, REGISTRY
from soothsay.server.access.api_keys import KeyRing
from soothsay.server.engines.engine_messages import Engine
from soothsay.server.engines.engine_process import EngineProcess, _run_worker
from soothsay.server.engines.nursery import Nursery
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.http_server import Server
from soothsay.server.runner import make_runner
from soothsay.server.server_config import ServerConfig


class WarmEngine(EngineProcess):
    """An engine whose process is a fork of one that has imported torch. The import takes most of a start."""

    def _launch(self, theirs: Connection) -> Any:
        arguments = self._factory, theirs, self._environment
        process = WARM.Process(target=_run_worker, args=arguments, name="engine", daemon=True)
        process.start()
        return process


@dataclass
class Running:
    server: Server
    url: str
    stop: Callable[[], None]

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def wait_until(self, true: Callable[[], bool], seconds: float = 20) -> None:
        """Wait until a condition holds. Fails after some seconds."""
        happened = threading.Event()
        for _ in range(int(seconds * 500)):
            if true():
                return
            happened.wait(0.002)
        raise AssertionError("it has not happened")

    def gauge(self, name: str) -> float:
        value = self.server.metrics.registry.get_sample_value(
            f"soothsay:{name}", {"model_name": self.server.config.name}
        )
        assert value is not None
        return value

    @property
    def in_engine(self) -> tuple[int, int]:
        """Numbers of running and of waiting answers."""
        return int(self.gauge("num_requests_running")), int(self.gauge("num_requests_waiting"))

    @property
    def free(self) -> bool:
        """Whether neither the engine nor the server has any job left."""
        loop = self.server.loop
        empty = self.in_engine == (0, 0) and self.gauge("kv_cache_usage_perc") == 0
        return empty and loop.in_flight == 0 and loop.num_jobs == 0


@contextmanager
def serving(
    factory: Callable[[], LLM],
    keys: KeyRing | None = None,
    name: str = "sibyl",
    *,
    ready: bool = True,
    replicas: int | None = None,
    ray: bool | None = None,
    forked: bool = False,
    **options: Any,
) -> Iterator[Running]:
    """Serve a model.

    Args:
        factory: see `EngineProcess`.
        keys: see `Server`.
        name: of the model.
        ready: begin when all engines have answered once.
        replicas: number of engines; None: what `SOOTHSAY_TEST_REPLICAS` says, or else 1.
        ray: whether they are Ray actors, on a new cluster; None: if `SOOTHSAY_TEST_RAY` is set, and on one
            cluster for all servers of this process.
        forked: whether they are forks of a nursery.
        options: of `ServerConfig`.
    """
    config = ServerConfig(name=name, drafters=tuple(REGISTRY), **options)
    size = replicas or int(os.environ.get("SOOTHSAY_TEST_REPLICAS", "1"))
    on_ray = "SOOTHSAY_TEST_RAY" in os.environ if ray is None else ray
    with ExitStack() as stack:
        make: Callable[[], Engine] = partial(WarmEngine, factory)
        if forked:
            make = stack.enter_context(Nursery(factory, 1)).engine
        elif on_ray:
            from soothsay.server.cluster.ray_engine import LOCAL, Cluster

            if ray is None:
                _start_ray()
            places = {"PYTHONPATH": os.pathsep.join(sys.path)}  # actors find the factory in a module of tests
            # Engines reserve no cores. One that waited for a core would wait for another server of its test.
            make = stack.enter_context(Cluster(LOCAL, factory, 0, places)).engine
        fleet = stack.enter_context(Fleet(make, size))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = Server(fleet, config, keys)
        runner = make_runner(server, "127.0.0.1", 0)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()

        def stop() -> None:
            runner.should_exit = True

        try:
            running = Running(server, f"http://127.0.0.1:{listening.getsockname()[1]}", stop)
            if ready:
                running.wait_until(lambda: server.watch.problem is None, 60)
                running.wait_until(lambda: None not in [one.answered_at for one in fleet.replicas], 60)
            yield running
        finally:
            stop()
            thread.join(30)
            assert not thread.is_alive()


@cache
def _start_ray() -> None:
    """Start the Ray cluster of this process. It ends with the process.

    A server that starts the cluster itself also ends it, and with it the engines of the other servers.
    """
    from soothsay.server.cluster.ray_engine import LOCAL, Cluster

    Cluster(LOCAL, LLM).__enter__()


@contextmanager
def command(log: Path, *options: str, files: int | None = None) -> Iterator[str]:
    """Run `soothsay serve sibyl` as a user does. Yields its address when it is ready.

    Args:
        log: the file for what it prints.
        options: further options.
        files: limit of open files.
    """
    serve = ("serve", "sibyl", "--port", "0", "--dtype", "int8")
    limits = {} if files is None else {resource.RLIMIT_NOFILE: files}
    process = Command(*serve, *options, limits=limits, log=log)
    try:
        for _ in range(1200):
            found = re.search(r"http://[\d.:]+", log.read_text())
            if found is not None and _is_ready(found[0]):
                break
            assert not process.ended, log.read_text()
            time.sleep(0.1)
        assert found is not None
        yield found[0]
    finally:
        process.send(signal.SIGTERM)
        process.finish(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False
