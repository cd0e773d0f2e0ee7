"""A server in a thread, on a port of its own, its engine in a process, and a client of OpenAI's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from soothsay import LLM, REGISTRY
from soothsay.server.app import Server
from soothsay.server.config import ServerConfig
from soothsay.server.keys import KeyRing
from soothsay.server.process import EngineProcess
from soothsay.server.run import make_runner


@dataclass
class Running:
    server: Server
    url: str
    stop: Callable[[], None]

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def wait_until(self, true: Callable[[], bool], seconds: float = 20) -> None:
        """Until something in the server's threads has happened, which is soon."""
        happened = threading.Event()
        for _ in range(int(seconds * 500)):
            if true():
                return
            happened.wait(0.002)
        raise AssertionError("it has not happened")

    def gauge(self, name: str) -> float:
        value = self.server.metrics.registry.get_sample_value(f"soothsay:{name}", {"model_name": "sibyl"})
        assert value is not None
        return value

    @property
    def in_engine(self) -> tuple[int, int]:
        """Answers that run and wait."""
        return int(self.gauge("num_requests_running")), int(self.gauge("num_requests_waiting"))

    @property
    def free(self) -> bool:
        """Whether nothing is left in the engine, and nothing is remembered here."""
        loop = self.server.loop
        empty = self.in_engine == (0, 0) and self.gauge("kv_cache_usage_perc") == 0
        return empty and loop.in_flight == 0 and not loop._jobs


@contextmanager
def serving(factory: Callable[[], LLM], keys: KeyRing | None = None, **options: Any) -> Iterator[Running]:
    config = ServerConfig(name="sibyl", drafters=tuple(REGISTRY), **options)
    with EngineProcess(factory) as engine, socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(engine, config, keys)
        runner = make_runner(server, "127.0.0.1", 0)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()

        def stop() -> None:
            runner.should_exit = True

        try:
            yield Running(server, f"http://127.0.0.1:{listening.getsockname()[1]}", stop)
        finally:
            stop()
            thread.join(30)
            assert not thread.is_alive()
