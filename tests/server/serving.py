"""A server in a thread, on a port of its own, and a client of OpenAI's."""

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
from soothsay.server.run import make_runner


@dataclass
class Running:
    server: Server
    url: str
    stop: Callable[[], None]

    @property
    def llm(self) -> LLM:
        return self.server.llm

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Until something in the server's threads has happened, which is soon."""
        happened = threading.Event()
        for _ in range(10_000):
            if true():
                return
            happened.wait(0.002)
        raise AssertionError("it has not happened")

    @property
    def free(self) -> bool:
        """Whether nothing is left in the engine."""
        engine = self.llm.engine
        return not engine.has_work and engine.allocator.num_free == engine.allocator.num_blocks


@contextmanager
def serving(llm: LLM, keys: KeyRing | None = None, **options: Any) -> Iterator[Running]:
    config = ServerConfig(name="sibyl", drafters=tuple(REGISTRY), **options)
    server = Server(llm, config, keys)
    runner = make_runner(server, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
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
