"""The way from the event loop to the engine's process and back: jobs, what comes for them, and restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from soothsay.engine.answer import SpeculationStats
from soothsay.engine.params import SamplingParams
from soothsay.errors import SoothsayError
from soothsay.server.errors import ApiError
from soothsay.server.messages import Admitted, Ask, Cancel, Model, News, Step
from soothsay.server.metrics import Metrics
from soothsay.server.parameters import Speculating
from soothsay.server.process import EngineProcess, Told

log = logging.getLogger("soothsay.server")

T = TypeVar("T")


class EngineState(StrEnum):
    """What there is of an engine."""

    OK = "ok"
    STARTING = "engine starting"
    STOPPED = "engine stopped"


@dataclass(slots=True)
class Answer:
    """How far one answer is, as of its last news."""

    read: int  # tokens of its prompt
    at: float  # when there last was news of it, or it arrived; of `time.monotonic`
    seed: int = 0
    said: int = 0
    found: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def update(self, news: News, at: float) -> None:
        """Take over what is new."""
        self.said, self.found, self.stats, self.at = news.said, news.found, news.stats, at


class Job:
    """The answers that one request of HTTP asks for. Iterate once, over what comes for any of them.

    Args:
        prompts: one at least; `params.n` answers to each.
        params: of all of them.
        speculating: who guesses, and when its turn is.
        drafter: what the one who guesses is called.
        timeout: seconds that it may take.

    Iterating raises `ApiError` if the answers cannot be had, or not in time.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        speculating: Speculating,
        drafter: str,
        timeout: float,
    ):
        self.number = -1  # among the jobs of an engine
        self.prompts, self.params, self.speculating = list(prompts), params, speculating
        self.drafter = drafter
        loop = asyncio.get_running_loop()
        self.arrived = time.monotonic()
        self._deadline = loop.time() + timeout
        self.answers = [Answer(len(prompt), self.arrived) for prompt in prompts for _ in range(params.n)]
        self.admitted: asyncio.Future[None] = loop.create_future()
        self._events: asyncio.Queue[News | None] = asyncio.Queue()  # None: there will be no more
        self._failure: ApiError | None = None

    @property
    def size(self) -> int:
        """Answers."""
        return len(self.answers)

    async def __aiter__(self) -> AsyncIterator[News]:
        while (event := await self.in_time(self._events.get())) is not None:
            yield event
        if self._failure is not None:
            raise self._failure

    async def in_time(self, waiting: Awaitable[T]) -> T:
        """What is waited for, unless the deadline comes first: then raises `ApiError`."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await waiting
        except TimeoutError:
            raise ApiError(504, "the answer took longer than this server allows", "timeout") from None

    def admit(self, seeds: Sequence[int]) -> None:
        """The engine has taken it."""
        for answer, seed in zip(self.answers, seeds, strict=True):
            answer.seed = seed
        if not self.admitted.done():  # it may be just too late
            self.admitted.set_result(None)

    def push(self, news: News) -> None:
        """There is more."""
        self._events.put_nowait(news)

    def finish(self, failure: ApiError | None) -> None:
        """There will be no more, for this reason if not all is well."""
        self._failure = failure
        if not self.admitted.done():
            if failure is None:
                self.admitted.cancel()
            else:
                self.admitted.set_exception(failure)
        self._events.put_nowait(None)


class EngineLoop:
    """The jobs of an engine's process, which is started again if it dies.

    All methods are the event loop's, and none waits for a step.

    Args:
        process: where the engine is. It has been loaded.
        metrics: what happens is counted there.
        max_in_flight: answers that wait or run, at most.
        settling: seconds after which an engine that was started again counts as sound. One that dies sooner
            is not started once more.
    """

    def __init__(self, process: EngineProcess, metrics: Metrics, max_in_flight: int, settling: float):
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.restarts = 0
        self.state = EngineState.STOPPED
        self._process, self._metrics, self._settling = process, metrics, settling
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._loaded = 0.0  # when it was, of `time.monotonic`
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def engine_pid(self) -> int | None:
        """Of the engine's process; None if there is none."""
        return None if self.state is EngineState.STOPPED else self._process.pid

    def start(self) -> None:
        """Begin to listen to the process. Call it within the event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = EngineState.OK
        self._process.listen(self._pass_on)

    async def stop(self) -> None:
        """End the process. What has not been answered by then fails."""
        self._stopping = True
        self.state = EngineState.STOPPED
        await asyncio.to_thread(self._process.end)
        self._fail_all(ApiError(503, "the server is shutting down", "shutting_down"))

    async def submit(self, job: Job) -> None:
        """Put a job in the line; returns once the engine has taken it.

        Raises `ApiError`: 400 for a request that cannot be served, 429 if too many wait, 503 if there is no
        engine, 504 if the engine does not take it in time.
        """
        if self.state is not EngineState.OK:
            raise _no_engine()
        if job.size > self.max_in_flight:
            raise ApiError(
                400, f"this asks for {job.size} answers at once; ask for fewer", "invalid_value", param="n"
            )
        if self.in_flight + job.size > self.max_in_flight:
            raise ApiError(
                429,
                "too many requests are waiting; try again later",
                "queue_full",
                headers={"Retry-After": "1"},
            )
        job.number = next(self._numbers)
        self._jobs[job.number] = job
        self.in_flight += job.size
        self._process.send(Ask(job.number, job.prompts, job.params, job.speculating))
        try:
            await job.in_time(job.admitted)
        except BaseException:
            self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """Give a job up: its memory is free before the next step. One that has ended is left alone."""
        if job.number in self._jobs:
            self._process.send(Cancel(job.number))
            self._finish(job, None)

    def _pass_on(self, told: Told) -> None:
        """In the thread that listens."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._hear, told)

    def _hear(self, told: Told) -> None:
        match told:
            case Step():
                self._deliver(told)
            case Admitted(number, seeds) if number in self._jobs:
                self._jobs[number].admit(seeds)
            case Model():
                self.state, self._loaded = EngineState.OK, time.monotonic()
                log.info("engine started", extra={"engine_pid": self._process.pid})
            case SoothsayError():
                log.error("engine not loaded", extra={"reason": str(told)})
            case None if not self._stopping:
                self._bury()

    def _deliver(self, step: Step) -> None:
        self._metrics.step(step)
        for news in step.news:
            job = self._jobs.get(news.job)
            if job is None:
                continue  # given up in the meantime
            answer = job.answers[news.index]
            self._metrics.see(job, answer, news, step.at)
            answer.update(news, step.at)
            job.push(news)
        for number, failure in step.ended.items():
            if number in self._jobs:
                self._finish(self._jobs[number], failure)

    def _finish(self, job: Job, failure: ApiError | None) -> None:
        del self._jobs[job.number]
        self.in_flight -= job.size
        job.finish(failure)

    def _fail_all(self, failure: ApiError) -> None:
        for job in list(self._jobs.values()):
            self._finish(job, failure)

    def _bury(self) -> None:
        """The process has died: fail what it worked on, and start another unless that has just been done."""
        sound = self.state is EngineState.OK and time.monotonic() - self._loaded >= self._settling
        self._fail_all(_no_engine())
        self._metrics.idle()
        self._process.end()
        again = sound or self.restarts == 0
        self.state = EngineState.STARTING if again else EngineState.STOPPED
        log.critical("engine died", extra={"exit_code": self._process.exit_code, "restart": again})
        if not again:
            return
        self.restarts += 1
        self._metrics.restarts.inc()
        try:
            self._process.start()
        except OSError:
            log.critical("engine not started", exc_info=True)
            self.state = EngineState.STOPPED
        else:
            self._process.listen(self._pass_on)


def _no_engine() -> ApiError:
    return ApiError(
        503,
        "the engine has stopped, and may be starting again; try again later",
        "engine_stopped",
        headers={"Retry-After": "5"},
    )
