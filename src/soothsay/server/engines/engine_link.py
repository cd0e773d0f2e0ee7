"""What a replica runs: an engine behind messages, in a process of this machine or of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from soothsay.errors import SoothsayError
from soothsay.server.engines.engine_messages import Incoming, Loaded, Outgoing

Received = Outgoing | SoothsayError | None
"""What an engine sends. An error says why the model could not be loaded; None is the end."""


class Engine(Protocol):
    """An engine that can be started again and again. `EngineProcess` is the example.

    Only `wait` blocks, and `end` for at most some seconds.
    """

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not known."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs, or if it is not known."""

    @property
    def host(self) -> str:
        """The machine's name; empty: this machine."""

    def start(self) -> None:
        """Begin to load the model. Raises `OSError` if that cannot be tried now."""

    def wait(self) -> Loaded:
        """Wait until the model is loaded. Call it before `listen`, or not at all. Raises `SoothsayError`."""

    def listen(self, receive: Callable[[Received], None]) -> None:
        """Call `receive`, from a thread, with each message from now on, and with None at the end."""

    def send(self, message: Incoming) -> None:
        """Queue a message."""

    def kill(self) -> None:
        """Kill the engine. `listen` then tells its end."""

    def end(self) -> None:
        """End the engine if it has not ended. Idempotent."""
