"""The engine's process, as the server sees it: started, spoken to, ended, started again."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from soothsay.errors import SoothsayError
from soothsay.server.messages import Incoming, Model, Outgoing

if TYPE_CHECKING:
    from soothsay.llm import LLM

GRACE = 5.0
"""Seconds that the engine gets to end by itself."""

SPAWN = multiprocessing.get_context("spawn")
"""A fresh interpreter: threads and locks of the server's process would not survive a fork."""

Told = Outgoing | SoothsayError | None
"""What comes from the engine; None is its end, and an error the reason why it could not be loaded."""


class EngineProcess:
    """An engine in a process of its own. Signals of a terminal or a supervisor do not reach it: it ends when
    it is told to, or when this process is gone.

    Entering loads it, and leaving ends it.

    Args:
        factory: makes the `LLM`, in the other process, so it must be picklable.

    Raises on entering: what the factory raises, if it is a `SoothsayError`, or one that says that the process
    ended before it was loaded.

    Example:
        >>> with EngineProcess(partial(load, "sibyl")) as engine:
        ...     make_runner(Server(engine, ServerConfig(name="sibyl")), "127.0.0.1", 8000).run()
    """

    model: Model
    """What was loaded."""

    def __init__(self, factory: Callable[[], LLM]):
        self._factory = factory

    def __enter__(self) -> Self:
        self.start()
        try:
            self.model = self._loaded()
        except BaseException:
            self.end(grace=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int | None:
        """Of the process, which may have ended."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the process; minus a signal's number if that killed it; None while it lives."""
        return self._process.exitcode

    def start(self) -> None:
        """Start a process, which begins to load. The one before it must have ended."""
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_live, args=(self._factory, theirs), name="engine", daemon=True)
        with _unsignalled():
            self._process.start()
        theirs.close()  # so that the pipe ends with the process
        self._outbox: SimpleQueue[Incoming | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._run(_write, self._pipe, self._outbox)

    def listen(self, hear: Callable[[Told], None]) -> None:
        """Have a thread call `hear` with what the process says from now on, and with None at its end."""
        self._run(_read, self._pipe, hear)

    def send(self, message: Incoming) -> None:
        """Say something, without waiting for it to be heard."""
        self._outbox.put(message)

    def end(self, grace: float = GRACE) -> None:
        """End the process, by force after `grace` seconds, and all that belongs to it. Twice is no harm."""
        self._outbox.put(None)
        self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._pipe.close()

    def _loaded(self) -> Model:
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            why = (
                "memory may be too small: use a smaller model or dtype, or fewer --kv-tokens"
                if self.exit_code == -signal.SIGKILL
                else "what it printed says why"
            )
            raise SoothsayError(
                f"the engine's process ended while it was loading, with exit code {self.exit_code}; {why}"
            ) from None
        if isinstance(said, SoothsayError):
            raise said
        model: Model = said
        return model

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"engine{target.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()


def load(model: str, **options: Any) -> LLM:
    """An `LLM`, made where torch is wanted: in the engine's process. The server's never imports it."""
    from soothsay.llm import LLM

    return LLM(model, **options)


def _live(factory: Callable[[], LLM], pipe: Connection) -> None:
    from soothsay.server.worker import live

    live(factory, pipe)


def _read(pipe: Connection, hear: Callable[[Told], None]) -> None:
    try:
        while True:
            hear(pipe.recv())
    except (EOFError, OSError):
        pass
    finally:
        hear(None)


def _write(pipe: Connection, outbox: SimpleQueue[Incoming | None]) -> None:
    message: Incoming | None
    with suppress(OSError):
        while True:
            pipe.send(message := outbox.get())
            if message is None:
                return


@contextmanager
def _unsignalled() -> Iterator[None]:
    """What is started in here is not interrupted or terminated by signals: it inherits that they are blocked.

    A supervisor may well signal all processes of a service, and a terminal does; the answers that run are to
    be given first.
    """
    resource_tracker.ensure_running()  # it would be started on the way otherwise, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
