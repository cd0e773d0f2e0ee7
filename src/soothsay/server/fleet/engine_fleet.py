"""A fleet: engines that answer as one, and the rule by which it grows and shrinks."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

from soothsay.errors import SoothsayError
from soothsay.server.engines import engine_messages as messages
from soothsay.server.fleet.dispatcher import Dispatcher, JobNews
from soothsay.server.fleet.replica import EngineState, Replica
from soothsay.server.http.json_log import log
from soothsay.server.server_config import ServerConfig

FULL = 0.8
"""Work, as a share of what the engines can have, above which one more is started."""

FREE = 0.4
"""Work, as a share of what one engine fewer could have, below which one goes. It is far below `FULL`, so an
engine that was started is not drained at once."""

GROW_AFTER = 5.0
"""Seconds without a break in which the engines must be full. A burst that ends sooner needs no engine."""

SHRINK_AFTER = 60.0
"""Seconds without a break in which an engine must be spare. Loading one takes seconds to minutes."""

MAX_REPLICAS = 1024
"""Limit of engines: a typing error should not fill a cluster."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest number of engines. Raises `SoothsayError` if they are none."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            problem = f"{self.least}:{self.most} is no range of engines"
            raise SoothsayError(f"{problem}: write MIN:MAX, from 1 to {MAX_REPLICAS}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "2", or "1:3" for between one and three. Raises `SoothsayError`."""
        if not (found := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text, re.ASCII)):
            raise SoothsayError(f"{text!r} is no number of engines: write 2, or 1:3 for between 1 and 3")
        return cls(int(found[1]), int(found[2] or found[1]))

    def clamp(self, size: int) -> int:
        """The number within the bounds that is nearest."""
        return min(max(size, self.least), self.most)


class Scaler:
    """The rule by which a fleet grows and shrinks, by one engine at a time. It has no clock of its own.

    An engine is added when work has been above `FULL` of all engines for `GROW_AFTER` seconds. An engine goes
    when work has been below `FREE` of one engine fewer for `SHRINK_AFTER` seconds. No engine is added while
    one loads.

    Work is measured in full engines: 1.5 is what fills one engine and half of another. An engine is full when
    it has as many answers as it runs at once (`EngineConfig.max_requests`), or no free KV blocks.

    Args:
        bounds: of the number of engines.

    Example:
        >>> scaler = Scaler(Bounds(1, 3))
        >>> [scaler.size(1, 1, 0.9, now) for now in (0, 3, 6)]
        [1, 1, 2]
    """

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.fixed: int | None = None  # the number that somebody has set by hand
        self._full_since: float | None = None
        self._spare_since: float | None = None

    def size(self, size: int, ready: int, work: float, now: float) -> int:
        """The number of engines that there should be.

        Args:
            size: engines that are to stay.
            ready: of these, engines that serve.
            work: of all engines, see above.
            now: seconds, from any starting point.
        """
        full = ready == size and work > FULL * size
        spare = work < FREE * (size - 1)
        self._full_since = (now if self._full_since is None else self._full_since) if full else None
        self._spare_since = (now if self._spare_since is None else self._spare_since) if spare else None
        if self.fixed is not None:
            return self.fixed
        if self._full_since is not None and now - self._full_since >= GROW_AFTER:
            size, self._full_since = size + 1, None
        elif self._spare_since is not None and now - self._spare_since >= SHRINK_AFTER:
            size, self._spare_since = size - 1, None
        return self.bounds.clamp(size)


TICK = 0.25
"""Seconds between two looks at all engines."""


class Fleet:
    """Engines with the same model. As a context manager, it starts them on entry and ends them on exit.

    One engine is a fleet too. If it dies, its jobs wait for the next one.

    Args:
        make: makes an engine that has not started.
        size: number of engines, at least 1. With `Bounds`, the fleet begins with the least, and grows and
            shrinks by the rule of `Scaler`.

    Raises `SoothsayError` on entry if the first engine cannot load the model.

    Example:
        >>> with Fleet(partial(EngineProcess, partial(load, "sibyl")), 2) as fleet:
        ...     make_runner(Server(fleet, ServerConfig(name="sibyl")), "127.0.0.1", 8000).run()
    """

    model: messages.LoadedModel
    """The model that the first engine has loaded."""

    jobs: Dispatcher
    """The jobs, from `start` on."""

    def __init__(self, make: Callable[[], messages.Engine], size: int | Bounds = 1):
        self._make = make
        self.scaler = Scaler(size if isinstance(size, Bounds) else Bounds(size, size))
        self.replicas: list[Replica] = []
        self.restarts = 0  # how often an engine was started again
        self._started = False
        self._engines: list[messages.Engine] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: messages.Loaded
        self._config: ServerConfig
        self._restarted: Callable[[], None]

    def __enter__(self) -> Self:
        try:
            for _ in range(self.scaler.bounds.least):
                self._start_engine()
            self._first = self._engines[0].wait()
            self.model = self._first.model
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end_all()

    def _end_all(self) -> None:
        for engine in self._engines:
            engine.end()

    @property
    def state(self) -> EngineState:
        """Whether at least one engine serves."""
        if not self._started:
            return EngineState.STOPPED
        return EngineState.OK if self.jobs.serving else EngineState.STARTING

    @property
    def capacity(self) -> int:
        """Answers that can take part in a step of each engine, together."""
        return self.model.max_requests * len(self.lasting)

    # Call what follows from the event loop.

    def start(
        self, config: ServerConfig, tell: Callable[[JobNews], None], restarted: Callable[[], None]
    ) -> None:
        """Begin to serve.

        Args:
            config: how engines are restarted.
            tell: called with what engines say of jobs.
            restarted: called when an engine is started again.
        """
        self._config, self._restarted = config, restarted
        self.jobs = Dispatcher(self.replicas, self.model, tell)
        for engine in self._engines:
            self._join(engine, None if self.replicas else self._first)
        self._started = True
        self._spawn(self._look_after())

    async def stop(self) -> None:
        """End all engines."""
        self._started = False
        for task in self._tasks:
            task.cancel()
        self.jobs.forget_all()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    @property
    def lasting(self) -> list[Replica]:
        """The engines that are not drained."""
        return [replica for replica in self.replicas if not replica.draining]

    def scale(self, size: int | None) -> None:
        """Set the number of engines, at least 1. New ones start; surplus ones are drained and end.

        Args:
            size: also outside of the bounds; None: leave it to the rule of `Scaler` again.
        """
        self.scaler.fixed = None if size is None else max(size, 1)
        self._adjust()

    def drain(self, replica: Replica) -> None:
        """Let an engine end. It gets no new jobs, and after `ServerConfig.drain` its answers go on elsewhere.

        If there are too few engines then, another one is started. The last one that serves stays until that
        one is loaded.
        """
        replica.draining = True
        log.info("engine drains", extra={"replica": replica.number})
        self._spawn(self._drain(replica))

    async def _drain(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.drain
        while self.jobs.has_jobs(replica) or self.jobs.serving == [replica]:
            if loop.time() >= until:
                self.jobs.hand_over(replica)
            await asyncio.sleep(TICK)
        self.replicas.remove(replica)
        self.jobs.removed(replica)
        self._engines.remove(replica.engine)
        await replica.stop()
        log.info("engine removed", extra={"replica": replica.number})

    def _adjust(self) -> None:
        """Start or drain engines, as the rule says."""
        lasting, loads = self.lasting, [replica.load for replica in self.replicas]
        ready = [replica for replica in lasting if replica.state is EngineState.OK]
        answers = sum(load.running + load.waiting for load in loads) / self.model.max_requests
        work = max(answers, sum(load.kv_usage for load in loads))
        size = self.scaler.size(len(lasting), len(ready), work, asyncio.get_running_loop().time())
        for _ in range(size - len(lasting)):
            self._join(self._start_engine(), None)
        for replica in sorted(lasting, key=lambda one: one in ready, reverse=True)[size:]:
            self.drain(replica)

    def _start_engine(self) -> messages.Engine:
        engine = self._make()
        engine.start()
        self._engines.append(engine)
        return engine

    def _join(self, engine: messages.Engine, loaded: messages.Loaded | None) -> None:
        replica = Replica(next(self._numbers), engine, self._config, self._hear, self._count_restart)
        self.replicas.append(replica)
        replica.listen(loaded)

    def _count_restart(self) -> None:
        self.restarts += 1
        self._restarted()

    def _hear(self, replica: Replica, received: messages.Received) -> None:
        match received:
            case messages.EngineUpdate():
                self.jobs.deliver(replica, received)
            case messages.Admitted():
                self.jobs.admitted(replica, received)
            case messages.Loaded():
                log.info("engine started", extra={"replica": replica.number, "engine_pid": replica.pid})
                self.jobs.welcome(replica)
            case SoothsayError():
                log.error("engine not loaded", extra={"replica": replica.number, "reason": str(received)})
            case None:
                self.jobs.lose(replica)

    async def _look_after(self) -> None:
        """Adjust the number of engines, and find those that are late, until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            try:
                self._adjust()
                if len(self.jobs.serving) > 1:
                    self.jobs.relieve()
                    for replica in self.jobs.serving:
                        replica.ping()
            except Exception:  # the watch must go on
                log.error("watch failed", exc_info=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the rest, until the fleet stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
