"""One engine of a fleet: whether it serves, how busy it is, and how it comes back after it has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from soothsay.core.engine_load import EngineLoad
from soothsay.core.numerics import UNKNOWN, Numerics
from soothsay.server.engines.engine_messages import Engine, EngineUpdate, Incoming, Loaded, Ping, Received
from soothsay.server.http.json_log import log
from soothsay.server.server_config import ServerConfig

IDLE = EngineLoad(0, 0, 0.0)

MEMORY = 0.98
"""Share of the longest silence that is left after a shorter one. Pings come some times a second."""


class EngineState(StrEnum):
    """The state of an engine, or of a fleet."""

    OK = "ok"
    STARTING = "engine starting"
    STOPPED = "engine stopped"  # the server has not begun to serve, or shuts down


class Backoff:
    """Waits of 0, then `first`, then twice as much each time, at most `longest` seconds.

    So an engine that dies once is back at once, and one that dies again and again takes little of the
    machine, but comes back by itself when the cause is gone.

    Example:
        >>> backoff = Backoff(1.0, 60.0)
        >>> [backoff.wait() for _ in range(9)]
        [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    """

    def __init__(self, first: float, longest: float):
        self._first, self._longest = first, longest
        self._next = 0.0

    def wait(self) -> float:
        """Seconds to wait this time."""
        seconds = self._next
        self._next = min(max(2 * seconds, self._first), self._longest)
        return seconds

    def reset(self) -> None:
        """Begin anew, because the engine was sound for long enough."""
        self._next = 0.0


class Replica:
    """An engine and its life. Call all methods from the event loop. None of them waits for a step.

    Args:
        number: its number in the fleet.
        engine: starts, or has started.
        config: how long to wait before a restart.
        hear: called from the event loop with each message, and with None when the engine has died.
        restarted: called when the engine is started again.
    """

    def __init__(
        self,
        number: int,
        engine: Engine,
        config: ServerConfig,
        hear: Callable[[Replica, Received], None],
        restarted: Callable[[], None],
    ):
        self.number, self.engine, self._hear, self._restarted = number, engine, hear, restarted
        self.state = EngineState.STARTING
        self.draining = False  # it gets no new jobs
        self.load = IDLE  # as last reported
        self.numerics: Numerics = UNKNOWN
        self.restarts = 0
        self.started_at = time.monotonic()  # all times are from this clock
        self.answered_at: float | None = None  # the last token of this process came then
        self.pinged_at: float | None = None  # the oldest ping after which the engine has said nothing
        self._longest_silence = 0.0
        self._settling = config.settling
        self._backoff = Backoff(config.restart_delay, config.max_restart_delay)
        self._loaded_at = 0.0
        self._restart: asyncio.Handle | None = None  # while no engine runs
        self._restart_at = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None if none runs."""
        stopped = self.state is EngineState.STOPPED or self._restart is not None
        return None if stopped else self.engine.pid

    @property
    def restart_in(self) -> float | None:
        """Seconds until the engine is started again; None if it runs."""
        return None if self._restart is None else max(self._restart_at - time.monotonic(), 0.0)

    @property
    def silence(self) -> float:
        """Seconds since the oldest ping without an answer."""
        return 0.0 if self.pinged_at is None else time.monotonic() - self.pinged_at

    def is_late(self, seconds: float) -> bool:
        """Whether its silence is longer than this, and than three times its longest recent silence."""
        return self.silence > max(seconds, 3 * self._longest_silence)

    def listen(self, loaded: Loaded | None = None) -> None:
        """Begin to listen to the engine. `loaded`: it has said this already."""
        if loaded is not None:
            self._begin_service(loaded)
        self.engine.listen(self._pass_on)

    def send(self, message: Incoming) -> None:
        """Send a message to the engine."""
        self.engine.send(message)

    def ping(self) -> None:
        """Ask the engine for a message, unless it was asked and has said nothing since."""
        if self.pinged_at is None:
            self.pinged_at = time.monotonic()
            self.engine.send(Ping())

    def kill(self) -> None:
        """Kill the engine, because it hangs. It is then restarted as if it had died."""
        self.engine.kill()

    async def stop(self) -> None:
        """End the engine for good."""
        self.state = EngineState.STOPPED
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        await asyncio.to_thread(self.engine.end)

    def _pass_on(self, received: Received) -> None:
        """Hand a message to the event loop. Called by the thread that reads."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._receive, received)

    def _receive(self, received: Received) -> None:
        if self.state is EngineState.STOPPED:
            return
        if self.pinged_at is not None:
            self._longest_silence = max(self.silence, MEMORY * self._longest_silence)
            self.pinged_at = None
        match received:
            case Loaded():
                self._begin_service(received)
            case EngineUpdate():
                self.load = received.load
                if any(change.token_ids for change in received.answers):
                    self.answered_at = received.at
            case None:
                self._begin_restart()
        self._hear(self, received)

    def _begin_service(self, loaded: Loaded) -> None:
        self.state, self._loaded_at = EngineState.OK, time.monotonic()
        self.numerics = loaded.numerics

    def _begin_restart(self) -> None:
        """The engine has died. Start another one, at once if it was sound, and later if it died young."""
        if self.answered_at is not None and time.monotonic() - self._loaded_at >= self._settling:
            self._backoff.reset()
        self.state, self.answered_at, self.load = EngineState.STARTING, None, IDLE
        self._longest_silence = 0.0
        self.engine.end()
        seconds = self._schedule_start()
        facts = {"replica": self.number, "exit_code": self.engine.exit_code, "restart_in": seconds}
        log.critical("engine died", extra=facts)

    def _schedule_start(self) -> float:
        seconds = self._backoff.wait()
        self._restart_at = time.monotonic() + seconds  # uvloop's handles do not tell it
        self._restart = self._loop.call_later(seconds, self._start)
        return seconds

    def _start(self) -> None:
        self._restart = None
        self.restarts += 1
        self._restarted()
        self.started_at = time.monotonic()
        try:
            self.engine.start()
        except OSError:
            log.critical("engine not started", exc_info=True)
            self._schedule_start()
        else:
            self.engine.listen(self._pass_on)
