"""Passes jobs from the event loop to the engine's process and updates back, and restarts the process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

from soothsay.core.load import EngineLoad
from soothsay.errors import SoothsayError
from soothsay.server.api_errors import ApiError
from soothsay.server.backoff import Backoff
from soothsay.server.jobs import Job
from soothsay.server.messages import Admitted, Cancel, EngineUpdate, LoadedModel, Ping, Submit
from soothsay.server.metrics import Metrics
from soothsay.server.process import EngineProcess, Received
from soothsay.server.server_config import ServerConfig

log = logging.getLogger("soothsay.server")


class EngineState(StrEnum):
    """The state of the engine's process."""

    OK = "ok"
    STARTING = "engine starting"
    STOPPED = "engine stopped"  # the server has not begun to serve, or shuts down


class EngineLoop:
    """The jobs of the engine's process. It restarts the process when that dies.

    Call all methods from the event loop. None of them waits for a step.

    Args:
        process: the engine's process, with the model loaded.
        metrics: counts what happens.
        max_in_flight: limit of answers that wait or run.
        config: how long to wait before a restart.
    """

    def __init__(self, process: EngineProcess, metrics: Metrics, max_in_flight: int, config: ServerConfig):
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.restarts = 0
        self.state = EngineState.STOPPED
        self.started_at = 0.0  # from `time.monotonic`, as all times here; of the process
        self.answered_at: float | None = None  # the last token of this process came then
        self.pinged_at: float | None = None  # the oldest ping after which the process has said nothing
        self._process, self._metrics, self._settling = process, metrics, config.settling
        self._backoff = Backoff(config.restart_delay, config.max_restart_delay)
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._loaded_at = 0.0
        self._restart: asyncio.TimerHandle | None = None  # while no process runs
        self._loop: asyncio.AbstractEventLoop

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None if no process runs."""
        stopped = self.state is EngineState.STOPPED or self._restart is not None
        return None if stopped else self._process.pid

    @property
    def restart_in(self) -> float | None:
        """Seconds until the engine's process is started again; None if it runs."""
        return None if self._restart is None else max(self._restart.when() - self._loop.time(), 0.0)

    @property
    def num_jobs(self) -> int:
        """Number of users' jobs that have not ended."""
        return sum(job.counted for job in self._jobs.values())

    def start(self) -> None:
        """Begin to listen to the process. Call it within the event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = EngineState.OK
        self.started_at = self._loaded_at = time.monotonic()
        self._process.listen(self._pass_on)

    async def stop(self) -> None:
        """End the process. Jobs that have not ended fail."""
        self.state = EngineState.STOPPED
        if self._restart is not None:
            self._restart.cancel()
        await asyncio.to_thread(self._process.end)
        self._fail_all(ApiError(503, "the server is shutting down", "shutting_down"))

    async def submit(self, job: Job) -> None:
        """Send a job to the engine, and wait until it is in the engine's waiting line.

        Raises `ApiError`: 400 if the job cannot be served, 429 if too many answers wait, 503 if there is no
        engine, 504 if the job's time is up first.
        """
        if self.state is not EngineState.OK:
            raise self._no_engine()
        self._check_room(job)
        job.number = next(self._numbers)
        self._jobs[job.number] = job
        self.in_flight += job.size * job.counted
        self._send(job)
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

    def ping(self) -> None:
        """Ask the process for a message, unless it was asked and has said nothing since."""
        if self.pinged_at is None:
            self.pinged_at = time.monotonic()
            self._process.send(Ping())

    def kill(self) -> None:
        """Kill the process, because it hangs. It is then restarted as if it had died."""
        self._process.kill()

    def _send(self, job: Job) -> None:
        self._process.send(Submit(job.number, job.prompts, job.params, job.options))

    def _check_room(self, job: Job) -> None:
        if job.size > self.max_in_flight:
            message = f"this asks for {job.size} answers at once; ask for fewer"
            raise ApiError(400, message, "invalid_value", param="n")
        if job.counted and self.in_flight + job.size > self.max_in_flight:
            message = "too many requests are waiting; try again later"
            raise ApiError(429, message, "queue_full", headers={"Retry-After": "1"})

    def _pass_on(self, received: Received) -> None:
        """Hand a message to the event loop. Called by the thread that reads the pipe."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._receive, received)

    def _receive(self, received: Received) -> None:
        self.pinged_at = None
        match received:
            case EngineUpdate():
                self._deliver(received)
            case Admitted(number, seeds) if number in self._jobs:
                self._jobs[number].admit(seeds)
            case LoadedModel():
                self._begin_service()
            case SoothsayError():
                log.error("engine not loaded", extra={"reason": str(received)})
            case None if self.state is not EngineState.STOPPED:
                self._replace_process()

    def _begin_service(self) -> None:
        self.state, self._loaded_at = EngineState.OK, time.monotonic()
        log.info("engine started", extra={"engine_pid": self._process.pid})
        for job in self._jobs.values():  # those that the last engine had not begun
            self._send(job)

    def _deliver(self, update: EngineUpdate) -> None:
        self._metrics.observe_engine(self._without_canary(update))
        for change in update.answers:
            job = self._jobs.get(change.job)
            if job is None:
                continue  # it was cancelled while the message was on its way
            answer = job.answers[change.index]
            if change.num_output > answer.num_output:
                self.answered_at = update.at
            if job.counted:
                self._metrics.observe_answer(job, answer, change, update.at)
            answer.take(change, update.at)
            job.push(change)
        for number, failure in update.ended.items():
            if number in self._jobs:
                self._finish(self._jobs[number], failure)

    def _without_canary(self, update: EngineUpdate) -> EngineUpdate:
        """An update as it would be without the jobs that no user asked for."""
        canaries = [job for job in self._jobs.values() if not job.counted]
        if not canaries:
            return update
        inside = sum(job.admitted.done() and job.number not in update.ended for job in canaries)
        load = without_canary(update.load, inside)
        return replace(update, load=load, decisions=update.decisions if self.num_jobs else {})

    def _finish(self, job: Job, failure: ApiError | None) -> None:
        del self._jobs[job.number]
        self.in_flight -= job.size * job.counted
        job.finish(failure)

    def _fail_all(self, failure: ApiError) -> None:
        for job in list(self._jobs.values()):
            self._finish(job, failure)

    def _replace_process(self) -> None:
        """The process has died. Start another one, at once if it was sound, and later if it was not.

        Jobs without any token wait for the new engine if it comes at once, but each only once: one of them
        may have killed the engine. All others fail.
        """
        if self.state is EngineState.OK and time.monotonic() - self._loaded_at >= self._settling:
            self._backoff.reset()
        self.state, self.answered_at = EngineState.STARTING, None
        self._metrics.set_idle()
        self._process.end()
        seconds = self._schedule_start()
        log.critical("engine died", extra={"exit_code": self._process.exit_code, "restart_in": seconds})
        failure = self._no_engine()
        for job in list(self._jobs.values()):
            if seconds or job.resubmitted or job.num_output or not job.counted:
                self._finish(job, failure)
            job.resubmitted = True

    def _schedule_start(self) -> float:
        seconds = self._backoff.wait()
        self._restart = self._loop.call_later(seconds, self._start_process)
        return seconds

    def _start_process(self) -> None:
        self._restart = None
        self.restarts += 1
        self._metrics.restarts.inc()
        self.started_at = time.monotonic()
        try:
            self._process.start()
        except OSError:
            log.critical("engine not started", exc_info=True)
            self._schedule_start()
        else:
            self._process.listen(self._pass_on)

    def _no_engine(self) -> ApiError:
        """The error while no engine is loaded. Clients are told when the next one starts."""
        message = "the engine has stopped, and is starting again; try again later"
        seconds = max(math.ceil(self.restart_in or 0), 1)
        return ApiError(503, message, "engine_stopped", headers={"Retry-After": str(seconds)})


def without_canary(load: EngineLoad, canaries: int) -> EngineLoad:
    """A load without some requests. They are taken from the running ones, as far as there are any."""
    running = max(load.running - canaries, 0)
    waiting = max(load.waiting - max(canaries - load.running, 0), 0)
    return EngineLoad(running, waiting, load.kv_usage if running or waiting else 0.0)
