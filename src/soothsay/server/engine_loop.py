"""Passes jobs from the event loop to the engine's process and updates back, and restarts the process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from enum import StrEnum

from soothsay.errors import SoothsayError
from soothsay.server.api_errors import ApiError
from soothsay.server.jobs import Job
from soothsay.server.messages import Admitted, Cancel, EngineUpdate, LoadedModel, Submit
from soothsay.server.metrics import Metrics
from soothsay.server.process import EngineProcess, Received

log = logging.getLogger("soothsay.server")


class EngineState(StrEnum):
    """The state of the engine's process."""

    OK = "ok"
    STARTING = "engine starting"
    STOPPED = "engine stopped"


class EngineLoop:
    """The jobs of the engine's process. It restarts the process when that dies.

    Call all methods from the event loop. None of them waits for a step.

    Args:
        process: the engine's process, with the model loaded.
        metrics: counts what happens.
        max_in_flight: limit of answers that wait or run.
        settling: seconds after which a restarted engine counts as sound. If it dies sooner, it is not
            restarted again.
    """

    def __init__(self, process: EngineProcess, metrics: Metrics, max_in_flight: int, settling: float):
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.restarts = 0
        self.state = EngineState.STOPPED
        self._process, self._metrics, self._settling = process, metrics, settling
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._loaded_at = 0.0  # from `time.monotonic`
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None if it is stopped for good."""
        return None if self.state is EngineState.STOPPED else self._process.pid

    @property
    def num_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

    def start(self) -> None:
        """Begin to listen to the process. Call it within the event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = EngineState.OK
        self._process.listen(self._pass_on)

    async def stop(self) -> None:
        """End the process. Jobs that have not ended fail."""
        self._stopping = True
        self.state = EngineState.STOPPED
        await asyncio.to_thread(self._process.end)
        self._fail_all(ApiError(503, "the server is shutting down", "shutting_down"))

    async def submit(self, job: Job) -> None:
        """Send a job to the engine, and wait until it is in the engine's waiting line.

        Raises `ApiError`: 400 if the job cannot be served, 429 if too many answers wait, 503 if there is no
        engine, 504 if the job's time is up first.
        """
        if self.state is not EngineState.OK:
            raise _no_engine()
        self._check_room(job)
        job.number = next(self._numbers)
        self._jobs[job.number] = job
        self.in_flight += job.size
        self._process.send(Submit(job.number, job.prompts, job.params, job.options))
        try:
            await job.in_time(job.admitted)
        except BaseException:
            self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """Give a job up. The engine frees its memory before the next step. Does nothing if it has ended."""
        if job.number in self._jobs:
            self._process.send(Cancel(job.number))
            self._finish(job, None)

    def _check_room(self, job: Job) -> None:
        if job.size > self.max_in_flight:
            message = f"this asks for {job.size} answers at once; ask for fewer"
            raise ApiError(400, message, "invalid_value", param="n")
        if self.in_flight + job.size > self.max_in_flight:
            message = "too many requests are waiting; try again later"
            raise ApiError(429, message, "queue_full", headers={"Retry-After": "1"})

    def _pass_on(self, received: Received) -> None:
        """Hand a message to the event loop. Called by the thread that reads the pipe."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._receive, received)

    def _receive(self, received: Received) -> None:
        match received:
            case EngineUpdate():
                self._deliver(received)
            case Admitted(number, seeds) if number in self._jobs:
                self._jobs[number].admit(seeds)
            case LoadedModel():
                self.state, self._loaded_at = EngineState.OK, time.monotonic()
                log.info("engine started", extra={"engine_pid": self._process.pid})
            case SoothsayError():
                log.error("engine not loaded", extra={"reason": str(received)})
            case None if not self._stopping:
                self._replace_process()

    def _deliver(self, update: EngineUpdate) -> None:
        self._metrics.observe_engine(update)
        for change in update.answers:
            job = self._jobs.get(change.job)
            if job is None:
                continue  # it was cancelled while the message was on its way
            answer = job.answers[change.index]
            self._metrics.observe_answer(job, answer, change, update.at)
            answer.take(change, update.at)
            job.push(change)
        for number, failure in update.ended.items():
            if number in self._jobs:
                self._finish(self._jobs[number], failure)

    def _finish(self, job: Job, failure: ApiError | None) -> None:
        del self._jobs[job.number]
        self.in_flight -= job.size
        job.finish(failure)

    def _fail_all(self, failure: ApiError) -> None:
        for job in list(self._jobs.values()):
            self._finish(job, failure)

    def _replace_process(self) -> None:
        """The process has died: fail all jobs, and start another process.

        A process that dies soon after a restart would only die again, so it is not replaced.
        """
        sound = self.state is EngineState.OK and time.monotonic() - self._loaded_at >= self._settling
        self._fail_all(_no_engine())
        self._metrics.set_idle()
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
    message = "the engine has stopped, and may be starting again; try again later"
    return ApiError(503, message, "engine_stopped", headers={"Retry-After": "5"})
