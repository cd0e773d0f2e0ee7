"""The engine in a thread of its own, and the way to it from an event loop.

Everything that touches the engine is done by its thread, between steps: what comes from the event loop waits
in an inbox, what goes to it is handed over once a step. So no request ever waits for a step of another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from soothsay.drafters import Drafter
from soothsay.engine.request import FinishReason, Piece, Request
from soothsay.engine.sampling import SamplingParams
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.server.errors import ApiError, internal_error
from soothsay.server.metrics import Metrics

log = logging.getLogger("soothsay.server")


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how to answer it, `params.n` times."""

    prompt: list[int]
    params: SamplingParams
    drafter: Drafter | None  # None: the model's own


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought for one answer."""

    index: int
    pieces: list[Piece]
    finish_reason: FinishReason | None
    at: float  # of `time.perf_counter`


class Job:
    """The answers that one request of HTTP asks for. Iterate once, over what comes for any of them.

    Args:
        asked: the prompts, one at least, all with the same parameters.
        deadline: of the event loop's clock; None for as long as it takes.

    Iterating raises `ApiError` if the answers cannot be had, or not in time.
    """

    def __init__(self, asked: Sequence[Asked], deadline: float | None = None):
        self.asked = asked
        self.deadline = deadline
        self.size = sum(one.params.n for one in asked)
        self.arrived = time.perf_counter()
        self.requests: list[Request] = []  # of the answers, in order; the engine's thread's
        self.failure: ApiError | None = None
        self.open = True
        self.last = [self.arrived] * self.size  # when each answer last had news
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[News | None] = asyncio.Queue()  # None: there will be no more

    async def __aiter__(self) -> AsyncIterator[News]:
        while True:
            try:
                async with asyncio.timeout_at(self.deadline):
                    event = await self.events.get()
            except TimeoutError:
                raise ApiError(504, "the answer took longer than this server allows", "timeout") from None
            if event is None:
                break
            yield event
        if self.failure is not None:
            raise self.failure


class EngineLoop:
    """Steps the engine as long as there is work, and restarts its thread once if it dies.

    All methods are the event loop's, and none waits for a step.

    Args:
        llm: whose engine it is. Nobody else may step it.
        metrics: what happens is counted there.
        max_in_flight: answers that wait or run, at most.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_in_flight: int):
        self.llm, self.engine = llm, llm.engine
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.restarts = 0
        self._metrics = metrics
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: set[Job] = set()  # those that the engine's thread works on, and its alone
        self._open: set[Job] = set()  # those that have not ended, as the event loop knows
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool:
        """Whether there is a thread that steps the engine."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Call it within the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step. What has not been answered by then fails."""
        thread, self._thread = self._thread, None
        self._inbox.put(None)
        if thread is not None:
            await asyncio.to_thread(thread.join)
        for job in list(self._open):
            self._finish(job, ApiError(503, "the server is shutting down", "shutting_down"))

    async def submit(self, job: Job) -> None:
        """Put a job in the line; returns once the engine has taken it.

        Raises `ApiError`: 400 for a request that cannot be served, 429 if too many wait, 503 if there is no
        engine.
        """
        if job.asked[0].params.grammar is not None:
            await asyncio.to_thread(compile_grammar, self.llm, job.asked[0].params)
        if not self.alive:
            raise ApiError(503, "the engine has stopped; see the server's log", "engine_stopped")
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
        self.in_flight += job.size
        self._open.add(job)
        self._inbox.put(partial(self._take, job))
        try:
            await job.admitted
        except asyncio.CancelledError:
            self.cancel(job)
            raise

    def cancel(self, job: Job) -> None:
        """Give a job up: its memory is free before the next step. One that has ended is left alone."""
        if job.open:
            self._inbox.put(partial(self._drop, job))

    # what the event loop does for the engine's thread

    def _deliver(
        self, batch: Sequence[tuple[Job, News]], ended: Sequence[tuple[Job, ApiError | None]]
    ) -> None:
        for job, news in batch:
            self._metrics.see(job.requests[news.index], news, job.arrived, job.last[news.index])
            job.last[news.index] = news.at
            job.events.put_nowait(news)
        for job, failure in ended:
            self._finish(job, failure)

    def _admit(self, job: Job) -> None:
        if not job.admitted.done():
            job.admitted.set_result(None)

    def _finish(self, job: Job, failure: ApiError | None) -> None:
        if not job.open:
            return
        job.open, job.failure = False, failure
        self._open.discard(job)
        self.in_flight -= job.size
        if not job.admitted.done():
            if failure is None:
                job.admitted.cancel()
            else:
                job.admitted.set_exception(failure)
        job.events.put_nowait(None)

    def _bury(self) -> None:
        """The engine's thread has died: fail what it worked on, and start another if none was yet."""
        if self._thread is None:
            return  # told to stop
        for job in list(self._open):
            self._finish(job, internal_error())
        self._jobs.clear()
        self._inbox = SimpleQueue()
        self._thread.join()
        if self.restarts == 0 and self._clear():
            self.restarts += 1
            self._metrics.restarts.inc()
            self.start()

    def _clear(self) -> bool:
        """Take everything out of the engine; whether it is as good as new."""
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self._remove(request, FinishReason.ERROR)
        return self.engine.allocator.num_free == self.engine.allocator.num_blocks

    # what the engine's thread does

    def _live(self) -> None:
        try:
            self._run(self._inbox)
        except BaseException:
            log.critical("engine died", exc_info=True)
            self._call(self._bury)

    def _run(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            while not inbox.empty() or not self.engine.has_work:
                act = inbox.get()
                if act is None:
                    return
                act()
            try:
                self.engine.step()
            except Exception:
                log.error("step failed", exc_info=True)
                self._metrics.failed_steps.inc()
                self._fail()
            self._give()

    def _call(self, what: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(partial(what, *args))

    def _take(self, job: Job) -> None:
        try:
            for one in job.asked:
                job.requests += submit(self.llm, one)
        except RequestError as error:
            self._release(job)
            self._call(self._finish, job, ApiError.from_request(error))
            return
        except Exception:
            log.error("request failed", exc_info=True)
            self._release(job)
            self._call(self._finish, job, internal_error())
            return
        self._jobs.add(job)
        self._call(self._admit, job)

    def _drop(self, job: Job) -> None:
        self._release(job)
        self._call(self._finish, job, None)

    def _release(self, job: Job) -> None:
        self._jobs.discard(job)
        for request in job.requests:
            if request.finish_reason is None:
                self._remove(request, FinishReason.CANCELLED)

    def _remove(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of the engine, whatever state that is in; its blocks are free then."""
        request.finish_reason = reason
        try:
            self.engine.scheduler.remove(request)
        except Exception:  # a drafter that cannot even forget; the blocks were freed before it was asked
            log.error("release failed", exc_info=True)

    def _fail(self) -> None:
        """A step has failed: end all that ran, for who is to blame is not known, or else the next in line."""
        scheduler = self.engine.scheduler
        for request in list(scheduler.running) or list(scheduler.waiting)[:1]:
            self._remove(request, FinishReason.ERROR)

    def _give(self) -> None:
        """Hand over what the step brought, all of it in one call."""
        now = time.perf_counter()
        batch: list[tuple[Job, News]] = []
        ended: list[tuple[Job, ApiError | None]] = []
        for job in list(self._jobs):
            for index, request in enumerate(job.requests):
                if request.pieces:
                    pieces = list(request.pieces)
                    request.pieces.clear()
                    batch.append((job, News(index, pieces, request.finish_reason, now)))
            reasons = [request.finish_reason for request in job.requests]
            if FinishReason.ERROR in reasons:
                self._release(job)
                ended.append((job, internal_error()))
            elif None not in reasons:
                self._jobs.discard(job)
                ended.append((job, None))
        if batch or ended:
            self._call(self._deliver, batch, ended)


def compile_grammar(llm: LLM, params: SamplingParams) -> None:
    """Have a grammar compiled, which may take a second, before the engine's thread asks for it.

    Raises `ApiError` if it cannot be.
    """
    try:
        llm.constraint(params)
    except RequestError as error:
        raise ApiError.from_request(error) from None


def submit(llm: LLM, asked: Asked) -> list[Request]:
    """Check a prompt and put its requests in the line. Raises `RequestError`."""
    requests = llm.requests(asked.prompt, asked.params, drafter=asked.drafter)
    for request in requests:
        llm.engine.add(request)
    return requests
