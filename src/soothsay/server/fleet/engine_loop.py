"""Passes jobs from routes to the engines, and updates back."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from soothsay.core.engine_load import EngineLoad
from soothsay.server.engines.engine_messages import Admitted, EngineUpdate, Submit
from soothsay.server.fleet.dispatcher import PATIENCE
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica import EngineState, Replica
from soothsay.server.fleet.server_metrics import Metrics
from soothsay.server.http.api_errors import ApiError, invalid, try_later
from soothsay.server.server_config import ServerConfig


class EngineLoop:
    """The jobs of the server. Call all methods from the event loop. None of them waits for a step.

    Args:
        fleet: the engines, with the model loaded.
        metrics: counts what happens.
        config: limits, and how engines are restarted.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics, config: ServerConfig):
        self.in_flight = 0  # users' answers that wait or run
        self._fleet, self._metrics, self._config = fleet, metrics, config
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}

    @property
    def max_in_flight(self) -> int:
        """Limit of answers that wait or run."""
        return self._fleet.capacity + self._config.max_queue

    @property
    def num_jobs(self) -> int:
        """Number of users' jobs that have not ended."""
        return sum(job.counted for job in self._jobs.values())

    def start(self) -> None:
        """Begin to listen to the engines. Call it within the event loop."""
        self._fleet.start(self._config, self._receive, self._metrics.restarts.inc)

    async def stop(self) -> None:
        """End the engines. Jobs that have not ended fail."""
        await self._fleet.stop()
        self.give_up()

    def give_up(self) -> None:
        """End all jobs that have not ended. They fail."""
        failure = ApiError(503, "the server is shutting down", "shutting_down")
        for job in list(self._jobs.values()):
            self._fleet.jobs.cancel(job.number)
            self._finish(job, failure)

    async def submit(self, job: Job, replica: Replica | None = None) -> None:
        """Send a job to an engine, and wait until it is in the engine's waiting line.

        Args:
            job: new.
            replica: the engine; None: the best one.

        Raises `ApiError`: 400 if the job cannot be served, 429 if too many answers wait, 503 if there is no
        engine for `PATIENCE` seconds, 504 if the job's time is up first.
        """
        if self._fleet.state is EngineState.STOPPED:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        patience = None
        if self._fleet.state is not EngineState.OK:
            if (self._fleet.jobs.restart_in or 0) > PATIENCE:
                raise self._fleet.jobs.no_engine()
            patience = PATIENCE
        if job.size > self.max_in_flight:
            raise invalid("n", f"this asks for {job.size} answers at once; ask for fewer")
        if job.counted and self.in_flight + job.size > self.max_in_flight:
            raise try_later("too many requests are waiting; try again later", "queue_full", status=429)
        job.number = next(self._numbers)
        self._jobs[job.number] = job
        self.in_flight += job.size * job.counted
        self._fleet.jobs.submit(Submit(job.number, job.prompts, job.params, job.options), replica)
        try:
            async with asyncio.timeout(patience):
                await job.in_time(job.admitted)
        except TimeoutError:
            self.cancel(job)
            raise self._fleet.jobs.no_engine() from None
        except BaseException:
            self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """Give a job up. The engine frees its memory before the next step. Does nothing if it has ended."""
        if job.number in self._jobs:
            self._fleet.jobs.cancel(job.number)
            self._finish(job, None)

    def _receive(self, told: Admitted | EngineUpdate) -> None:
        if isinstance(told, EngineUpdate):
            self._deliver(told)
        elif told.job in self._jobs:
            self._jobs[told.job].admit(told.seeds)

    def _deliver(self, update: EngineUpdate) -> None:
        self._metrics.observe_engine(self._without_canary(update))
        for change in update.answers:
            job = self._jobs[change.job]
            answer = job.answers[change.index]
            if job.counted:
                self._metrics.observe_answer(job, answer, change, update.at)
            answer.take(change, update.at)
            job.push(change)
        for number, failure in update.ended.items():
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


def without_canary(load: EngineLoad, canaries: int) -> EngineLoad:
    """A load without some requests. They are taken from the running ones, as far as there are any."""
    running = max(load.running - canaries, 0)
    waiting = max(load.waiting - max(canaries - load.running, 0), 0)
    return EngineLoad(running, waiting, load.kv_usage if running or waiting else 0.0)
