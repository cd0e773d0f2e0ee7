"""What runs in the engine's process: a loop of steps, and between them what the server asks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from soothsay.drafters import REGISTRY, Drafter, build_drafter
from soothsay.engine.answer import FinishReason
from soothsay.engine.request import Request
from soothsay.errors import DrafterError, RequestError, SoothsayError
from soothsay.llm import LLM
from soothsay.server.errors import ApiError, internal_error
from soothsay.server.log import log_to_stderr
from soothsay.server.messages import Admitted, Ask, Cancel, Incoming, Load, Model, News, Outgoing, Step

log = logging.getLogger("soothsay.server")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request needs has been compiled and built, or cannot be."""

    ask: Ask
    error: ApiError | None


Inbox = SimpleQueue[Incoming | Prepared]


def live(factory: Callable[[], LLM], pipe: Connection) -> None:
    """Load an engine and step it until the server's end of the pipe is closed or says None.

    What the pipe gets first is a `Model`, or the `SoothsayError` for which there is none.
    """
    log_to_stderr()
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), name="listen", daemon=True).start()
    try:
        llm = factory()
    except SoothsayError as error:
        pipe.send(error)
        return
    try:
        pipe.send(_model(llm))
        Worker(llm, pipe.send, inbox).run()
    except BrokenPipeError:  # the server is gone
        os._exit(0)
    except BaseException:
        log.critical("engine died", exc_info=True)
        os._exit(1)  # whatever other threads are at


def _listen(pipe: Connection, inbox: Inbox) -> None:
    try:
        while (message := pipe.recv()) is not None:
            inbox.put(message)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # in the middle of whatever it is: nothing here is worth keeping without a server


def _model(llm: LLM) -> Model:
    return Model(
        tokenizer=llm.tokenizer,
        vocab_size=llm.model.config.vocab_size,
        max_context=llm.config.max_context or 0,
        max_requests=llm.config.max_requests,
        drafter=str(llm.drafter),
        drafters=tuple(REGISTRY),
    )


class Worker:
    """Steps an engine as long as there is work, and tells once a step all that the step brought.

    Args:
        llm: whose engine it is. Nobody else may step it.
        tell: takes what the server is told.
        inbox: what the server asks. It is looked at between steps.
    """

    def __init__(self, llm: LLM, tell: Callable[[Outgoing], None], inbox: Inbox):
        self._llm, self._engine = llm, llm.engine
        self._tell, self._inbox = tell, inbox
        self._jobs: dict[int, list[Request]] = {}
        self._preparing: set[int] = set()
        self._side = ThreadPoolExecutor(1, "prepare")
        self._drafters: dict[str, Drafter] = {}  # those that requests have named
        self._asked: dict[Drafter, None] = {}  # those that requests have had
        self._load = Load(0, 0, 0.0)  # as it was last told
        self._decisions: Counter[str] = Counter()  # likewise

    def run(self) -> None:
        """Never returns."""
        while True:
            while not self._inbox.empty() or not self._engine.has_work:
                if self._inbox.empty():  # the last step's load must not be taken for that of an idle engine
                    self._report()
                self._act(self._inbox.get())
            self._report(failed=not self._step())

    def _act(self, message: Incoming | Prepared) -> None:
        match message:
            case Ask() if self._is_new(message):
                self._preparing.add(message.job)
                self._side.submit(self._prepare, message)
            case Ask():
                self._take(message)
            case Prepared(ask, error) if ask.job in self._preparing:
                self._preparing.discard(ask.job)
                if error is None:
                    self._take(ask)
                else:
                    self._report(refused={ask.job: error})
            case Cancel(job):
                self._preparing.discard(job)
                self._drop(job, FinishReason.CANCELLED)

    def _is_new(self, ask: Ask) -> bool:
        """Whether something must be compiled or built first, for which steps shall not wait."""
        name = ask.speculating.drafter
        return ask.params.grammar is not None or (name is not None and name not in self._drafters)

    def _prepare(self, ask: Ask) -> None:
        """In a thread beside that of the steps."""
        name, error = ask.speculating.drafter, None
        try:
            if name is not None and name not in self._drafters:
                self._drafters[name] = build_drafter(name, self._engine.target)
            self._llm.constraint(ask.params)
        except Exception as problem:
            error = _refusal(problem, name)
        self._inbox.put(Prepared(ask, error))

    def _take(self, ask: Ask) -> None:
        """Put a job in the line, or refuse all of it."""
        wanted = ask.speculating
        drafter = None if wanted.drafter is None else self._drafters[wanted.drafter]
        requests: list[Request] = []
        try:
            for prompt in ask.prompts:
                requests += self._llm.requests(
                    prompt,
                    ask.params,
                    drafter=drafter,
                    max_nodes=wanted.max_nodes,
                    priority=wanted.priority,
                    traced=wanted.traced,
                )
        except Exception as problem:
            self._report(refused={ask.job: _refusal(problem, wanted.drafter)})
            return
        for request in requests:
            self._engine.add(request)
            self._asked[request.drafter] = None
        self._jobs[ask.job] = requests
        self._tell(Admitted(ask.job, [request.seed for request in requests]))

    def _step(self) -> bool:
        """Whether the step went well. If not, all that ran ends, for who is to blame is not known; if none
        ran, the next in line does.
        """
        try:
            self._engine.step()
        except Exception:
            log.error("step failed", exc_info=True)
            scheduler = self._engine.scheduler
            for request in list(scheduler.running) or list(scheduler.waiting)[:1]:
                self._remove(request, FinishReason.ERROR)
            return False
        return True

    def _drop(self, job: int, reason: FinishReason) -> None:
        for request in self._jobs.pop(job, ()):
            if request.finish_reason is None:
                self._remove(request, reason)

    def _remove(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of the engine, whatever state that is in; its blocks are free then."""
        request.finish_reason = reason
        try:
            self._engine.scheduler.remove(request)
        except Exception:  # a drafter that cannot even forget; the blocks were freed before it was asked
            log.error("release failed", exc_info=True)

    def _report(self, *, failed: bool = False, refused: dict[int, ApiError] | None = None) -> None:
        """Tell what is new, if anything is."""
        news: list[News] = []
        ended: dict[int, ApiError | None] = dict(refused or {})
        for job, requests in list(self._jobs.items()):
            news += [_news(job, i, request) for i, request in enumerate(requests) if request.pieces]
            reasons = [request.finish_reason for request in requests]
            if FinishReason.ERROR in reasons:
                self._drop(job, FinishReason.ERROR)
                ended[job] = internal_error()
            elif None not in reasons:
                del self._jobs[job]
                ended[job] = None
        scheduler, allocator = self._engine.scheduler, self._engine.allocator
        usage = 1 - allocator.num_free / allocator.num_blocks
        load = Load(len(scheduler.running), len(scheduler.waiting), usage)
        if not news and not ended and not failed and load == self._load:
            return
        decisions = sum((Counter(drafter.decisions) for drafter in self._asked), Counter[str]())
        made = dict(decisions - self._decisions)
        self._load, self._decisions = load, decisions
        self._tell(Step(time.monotonic(), news, ended, load, made, failed))


def _news(job: int, index: int, request: Request) -> News:
    """What has come for an answer since it was last looked at."""
    pieces = list(request.pieces)
    request.pieces.clear()
    traces = list(request.traces or ())
    if request.traces:
        request.traces.clear()
    logprobs = None
    if request.params.logprobs is not None:  # the token that ends an answer is not part of it
        ends = request.end_tokens
        logprobs = [p.logprobs for p in pieces if p.logprobs is not None and p.token not in ends]
    return News(
        job=job,
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        traces=traces,
        said=request.num_output,
        found=request.num_prefix_hits,
        preemptions=request.num_preemptions,
        stats=request.stats,
        finish_reason=request.finish_reason,
    )


def _refusal(error: Exception, drafter: str | None) -> ApiError:
    """What the client is told of an error; the log is told more, where that says more."""
    if isinstance(error, RequestError):
        return ApiError.from_request(error)
    if isinstance(error, DrafterError):  # the message may tell paths
        log.warning("drafter not available", extra={"drafter": drafter, "reason": str(error)})
        message = f"drafter {drafter!r} does not fit this model, or its files are missing"
        return ApiError(400, message, "invalid_value", param="speculation.drafter")
    log.error("request failed", exc_info=error)
    return internal_error()
