"""The loop that runs in the engine's process. It steps the engine, and reads messages between steps."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from soothsay.core.answer import FinishReason
from soothsay.core.constraint import Constraint
from soothsay.core.engine_load import EngineLoad
from soothsay.core.request import Request
from soothsay.drafters.base import Drafter
from soothsay.drafters.registry import build_drafter, drafters_with_files
from soothsay.errors import DrafterError, RequestError, SoothsayError
from soothsay.llm import LLM
from soothsay.progress import progress_shown_by
from soothsay.server.engines import engine_messages as messages
from soothsay.server.engines.idle_work import IdleWork, numerics
from soothsay.server.http.api_errors import ApiError, internal_error, invalid
from soothsay.server.http.json_log import log, log_to_stderr


@dataclass(frozen=True, slots=True)
class Prepared:
    """Says that the grammar and the drafter of a job are ready, or why they cannot be had."""

    submit: messages.Submit
    error: ApiError | None
    constraint: Constraint | None  # keeps the compiled grammar until the job is admitted


Inbox = SimpleQueue[messages.Incoming | Prepared | None]
"""Messages to a worker. None: the server needs it no more."""

REPORT_INTERVAL = 0.01
"""Seconds between two reports that bring further text only. A report takes 0.6 to 0.7 ms of the cores that
compute, which is a tenth of a token's time in a small model. Nobody reads so fast."""

LAST_SAVE = 4.0
"""Seconds that a worker has to finish its step and to save what drafters have learned, before it ends."""


def run_worker(factory: Callable[[], LLM], pipe: Connection) -> None:
    """Load a model and step its engine, until the server sends None or closes its end of the pipe.

    The messages to the server begin with `Loading`, and then `Loaded`, or the `SoothsayError` that says why
    there is none.
    """
    log_to_stderr()
    inbox: Inbox = SimpleQueue()
    saves = threading.Event()
    threading.Thread(target=_listen, args=(pipe, inbox, saves), name="listen", daemon=True).start()

    def show(what: str, done: int, total: int) -> None:
        with suppress(OSError):
            pipe.send(messages.Loading(what, done, total))

    try:
        with progress_shown_by(show):
            llm = factory()
    except SoothsayError as error:
        pipe.send(error)
        return
    try:
        pipe.send(messages.Loaded.of(_model(llm), numerics(llm)))
        if llm.engine.kept is not None:
            saves.set()
        Worker(llm, pipe.send, inbox).run()
        os._exit(0)
    except BrokenPipeError:  # the server's process has ended
        os._exit(0)
    except BaseException:
        log.critical("engine died", exc_info=True)
        os._exit(1)  # do not wait for other threads


def _listen(pipe: Connection, inbox: Inbox, saves: threading.Event) -> None:
    """Put messages of the server into the inbox, and end the process after the last one.

    If `saves` is set, the worker has some time to end it itself.
    """
    try:
        while (message := pipe.recv()) is not None:
            inbox.put(message)
        if saves.is_set():
            inbox.put(None)
            time.sleep(LAST_SAVE)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # even in the middle of a step: without a server, nobody needs its result


def _model(llm: LLM) -> messages.LoadedModel:
    return messages.LoadedModel(
        tokenizer=llm.tokenizer,
        vocab_size=llm.model.spec.vocab_size,
        max_context=llm.config.max_context or 0,
        max_requests=llm.config.max_requests,
        block_size=llm.engine.allocator.block_size,
        num_blocks=llm.engine.allocator.num_blocks,
        drafter=str(llm.drafter),
        drafters=drafters_with_files(llm.engine.target),
        sampling_defaults=llm.sampling_defaults,
        adapters=tuple(llm.adapters),
        about=llm.about(),
    )


class Worker:
    """Steps an engine while there is work. Sends the updates of all answers after a step, in one message.

    After a short step the message waits for the next step, unless an answer has begun or ended.

    Args:
        llm: the model and its engine. Nothing else may step the engine.
        send: sends a message to the server.
        inbox: messages of the server. The worker reads them between steps.
    """

    def __init__(self, llm: LLM, send: Callable[[messages.Outgoing], None], inbox: Inbox):
        self._llm, self._engine = llm, llm.engine
        self._send, self._inbox = send, inbox
        self._jobs: dict[int, list[Request]] = {}
        self._preparing: set[int] = set()
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._unprepared: dict[str, deque[messages.Submit]] = {}  # by tenant; the next one's is first
        self._unprepared_lock = threading.Lock()
        self._drafters: dict[str, Drafter] = {}  # by the name that requests give
        self._load = EngineLoad(0, 0, 0.0)  # as last reported
        self._decisions: Counter[str] = Counter()  # as last reported
        self._reported = 0.0  # when text was last reported
        self._idle_work = IdleWork(llm.engine)

    def run(self) -> None:
        """Read messages and step, until a message is None. Then save what drafters have learned."""
        try:
            self._work()
        except BaseException:  # the next engine goes on after the last token that was reported
            with suppress(Exception):
                self._report()
            raise

    def _work(self) -> None:
        while True:
            while not self._inbox.empty() or not self._engine.has_work:
                self._report()  # the message may take long, or not come
                message = self._next_message()
                if message is None:
                    self._idle_work.save()
                    return
                self._act(message)
            worked = self._engine.step()
            if not worked or self._is_due():
                self._report(failed=not worked)
            self._idle_work.after_step()

    def _next_message(self) -> messages.Incoming | Prepared | None:
        """Wait for a message. The time is used for what is due."""
        while True:
            try:
                return self._inbox.get(timeout=self._idle_work.seconds_to_next())
            except Empty:
                self._idle_work.run()

    def _act(self, message: messages.Incoming | Prepared) -> None:
        match message:
            case messages.Submit() if self._needs_preparation(message):
                self._preparing.add(message.job)
                with self._unprepared_lock:
                    self._unprepared.setdefault(message.options.tenant.name, deque()).append(message)
                self._preparer.submit(self._prepare_next)
            case messages.Submit():
                self._admit(message)
            case Prepared(submit, error, _) if submit.job in self._preparing:
                self._preparing.discard(submit.job)
                if error is None:
                    self._admit(submit)
                else:
                    self._report(refused={submit.job: error})
            case messages.Ping():
                self._send(messages.Pong())
            case messages.CatchUp(job, emitted):
                for request, one in zip(self._jobs.get(job, ()), emitted, strict=False):
                    self._engine.catch_up(request, one.tokens, ended=one.ended)
            case messages.Cancel(job):
                self._preparing.discard(job)
                self._drop(job, FinishReason.CANCELLED)

    def _needs_preparation(self, submit: messages.Submit) -> bool:
        """Whether a grammar must be compiled or a drafter built. Both take long, so steps go on meanwhile."""
        name = submit.options.drafter
        return submit.params.grammar is not None or (name is not None and name not in self._drafters)

    def _prepare_next(self) -> None:
        """Prepare one job. Runs in a thread of its own. The names take turns, so none fills the line."""
        with self._unprepared_lock:
            name = next(iter(self._unprepared))
            line = self._unprepared.pop(name)
            submit = line.popleft()
            if line:
                self._unprepared[name] = line
        if submit.job in self._preparing:  # it was not cancelled while it waited
            self._prepare(submit)

    def _prepare(self, submit: messages.Submit) -> None:
        """Compile the grammar and build the drafter."""
        name, error, constraint = submit.options.drafter, None, None
        try:
            if name is not None and name not in self._drafters:
                self._drafters[name] = build_drafter(name, self._engine.target)
            constraint = self._llm.constraint(submit.params, submit.options.tenant)
        except Exception as problem:
            error = _refusal(problem, name)
        self._inbox.put(Prepared(submit, error, constraint))

    def _admit(self, submit: messages.Submit) -> None:
        """Put all requests of a job into the engine's waiting line, or refuse them all."""
        options = submit.options
        drafter = None if options.drafter is None else self._drafters[options.drafter]
        names = "max_nodes", "priority", "traced", "tenant", "adapter"
        given = {name: getattr(options, name) for name in names}
        requests: list[Request] = []
        try:
            for prompt in submit.prompts:
                requests += self._llm.requests(prompt, submit.params, drafter=drafter, **given)
        except Exception as problem:
            self._report(refused={submit.job: _refusal(problem, options.drafter)})
            return
        for request, emitted in zip(requests, submit.emitted, strict=False):
            request.resume(emitted.tokens, ended=emitted.ended)
        for request in requests:
            request.caller = options.tenant.name or submit.job
            if request.finish_reason is None:
                self._engine.add(request)
        self._jobs[submit.job] = requests
        self._send(messages.Admitted(submit.job, [request.seed for request in requests]))

    def _drop(self, job: int, reason: FinishReason) -> None:
        for request in self._jobs.pop(job, ()):
            self._engine.cancel(request, reason)

    def _is_due(self) -> bool:
        """Whether to report after a step: an answer has begun or ended, or the last report was long ago."""
        if time.monotonic() - self._reported >= REPORT_INTERVAL:
            return True
        running = [request for own in self._jobs.values() for request in own]
        return any(one.finish_reason is not None or messages.is_beginning(one) for one in running)

    def _report(self, *, failed: bool = False, refused: dict[int, ApiError] | None = None) -> None:
        """Send what has changed since the last report, if anything has."""
        updates: list[messages.AnswerUpdate] = []
        ended: dict[int, ApiError | None] = dict(refused or {})
        for job, requests in list(self._jobs.items()):
            news = [(i, request) for i, request in enumerate(requests) if messages.has_news(request)]
            updates += [messages.answer_update(job, i, request) for i, request in news]
            failure = next((one.failure for one in requests if one.failure is not None), None)
            if failure is not None:
                self._drop(job, FinishReason.ERROR)
                ended[job] = internal_error()  # the engine has logged it
                if isinstance(failure, RequestError):
                    ended[job] = ApiError.from_request(failure)
            elif all(request.finish_reason is not None for request in requests):
                del self._jobs[job]
                ended[job] = None
        load = self._engine.load
        if not updates and not ended and not failed and load == self._load:
            return
        decisions, now = self._engine.decisions, time.monotonic()
        new_decisions = dict(decisions - self._decisions)
        self._load, self._decisions = load, decisions
        if updates:
            self._reported = now
        self._send(messages.EngineUpdate(now, updates, ended, load, new_decisions, failed))


def _refusal(error: Exception, drafter: str | None) -> ApiError:
    """The error that the client gets. Details that a client must not see go to the log."""
    if isinstance(error, RequestError):
        return ApiError.from_request(error)
    if isinstance(error, DrafterError):  # its message may contain paths
        log.warning("drafter not available", extra={"drafter": drafter, "reason": str(error)})
        message = f"drafter {drafter!r} does not fit this model, or its files are missing"
        return invalid("speculation.drafter", message)
    log.error("request failed", exc_info=error)
    return internal_error()
