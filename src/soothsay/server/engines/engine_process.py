"""The engine's process, seen from the server: start, send, listen, end, and start again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from soothsay.errors import SoothsayError
from soothsay.options import build_llm
from soothsay.own_process import SAFE_PATH
from soothsay.processors import claim_cores
from soothsay.progress import tell_progress
from soothsay.server.engines.engine_messages import Incoming, Loaded, Loading, Received
from soothsay.server.http.json_log import log

if TYPE_CHECKING:
    from soothsay.llm import LLM


PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
"""Variables with which PyTorch computes with the instructions that all x86-64 processors have. With the
kernels "portable", the bits of an engine then do not depend on its processor."""

GRACE = 5.0
"""Seconds in which the engine can end by itself before it is killed."""

SPAWN = multiprocessing.get_context("spawn")
"""Starts a fresh interpreter. A fork would copy locks of the server's process, but not its threads."""


class Fork:
    """The process of an engine, as far as the nursery has told of it. It is like a `SpawnProcess`.

    Args:
        nursery: process id of the nursery. It stands for the engine's while the model is being loaded.
    """

    def __init__(self, nursery: int | None):
        self.pid = nursery
        self.exitcode: int | None = None
        self._ended = threading.Event()

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.pid is not None and not self._ended.is_set():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._ended.set()

    def is_alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, or for some seconds."""
        self._ended.wait(timeout)

    def end(self, exitcode: int | None) -> None:
        """Note that the process has ended. None: its exit code is not known."""
        self.exitcode = exitcode
        self._ended.set()


class EngineProcess:
    """An engine in a process of its own on this machine. It is an `Engine`, and documents no more than that.

    Signals from a terminal or a supervisor do not reach the process. It ends when the server tells it to, or
    when the server's process ends.

    Args:
        factory: makes the `LLM` in the new process. It must be picklable.
        environment: variables of the new process, set before it imports torch.
    """

    def __init__(self, factory: Callable[[], LLM], environment: Mapping[str, str] = MappingProxyType({})):
        self._factory, self._environment = factory, dict(environment)

    @property
    def pid(self) -> int | None:
        """Process id. The process may have ended."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; minus the signal's number if a signal killed it; None while it runs."""
        return self._process.exitcode

    def start(self) -> None:
        """Start a process, which begins to load the model. The previous process must have ended.

        Raises `OSError` if the system has no room for a process. This object is then as it was.
        """
        pipe, theirs = SPAWN.Pipe()
        try:
            process = self._launch(theirs)
        except BaseException:
            pipe.close()
            raise
        finally:
            theirs.close()  # so that the pipe ends with the process
        self._pipe, self._process = pipe, process
        self._outbox: SimpleQueue[Incoming | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._start_thread(write_messages, self._pipe, self._outbox)

    def _launch(self, theirs: Connection) -> SpawnProcess | Fork:
        """Start the process with its end of the pipe."""
        arguments = self._factory, theirs, self._environment
        process = SPAWN.Process(target=_run_worker, args=arguments, name="engine", daemon=True)
        with safe_start():
            process.start()
        return process

    def listen(self, receive: Callable[[Received], None]) -> None:
        """Start a thread that calls `receive` with each message from now on, and with None at the end."""
        self._start_thread(read_messages, self._pipe, receive)

    def send(self, message: Incoming) -> None:
        """Queue a message for the process. Returns at once."""
        self._outbox.put(message)

    def kill(self) -> None:
        """Kill the process, and return at once. `listen` then tells its end."""
        self._process.kill()

    def end(self, grace: float = GRACE) -> None:
        """End the process, its threads and its pipe. Kills it after `grace` seconds. Idempotent."""
        self._outbox.put(None)
        self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._pipe.close()

    def wait(self) -> Loaded:
        """Wait until the model is loaded. Call it before `listen`, or not at all. Raises `SoothsayError`."""
        try:
            while isinstance(received := self._pipe.recv(), Loading):
                tell_progress(received.what, received.done, received.total)
        except (EOFError, OSError):
            self._process.join(GRACE)
            advice = "see what it printed"
            if self.exit_code == -signal.SIGKILL:
                advice = "memory may be too small: use a smaller model or dtype, or less --kv-memory"
            problem = f"the engine's process ended while it was loading, with exit code {self.exit_code}"
            raise SoothsayError(f"{problem}; {advice}") from None
        if not isinstance(received, Loaded):
            raise received
        return received

    def _start_thread(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=target.__name__, daemon=True)
        self._threads.append(thread)
        thread.start()


def load(model: str, *, cores: int | None = None, **options: Any) -> LLM:
    """Make the `LLM` of an engine; see `build_llm`.

    `cores`: the number of physical cores that the process gets for itself; None: it shares all.
    """
    if cores is not None:
        pin(cores)
    return build_llm(model, **options)


def pin(cores: int) -> None:
    """Let this process run on physical cores of its own, with as many threads."""
    pinned = claim_cores(cores)
    import torch

    torch.set_num_threads(cores)
    if not pinned:
        log.warning("no core of its own is free for an engine", extra={"cores": cores})


def _run_worker(factory: Callable[[], LLM], pipe: Connection, environment: dict[str, str]) -> None:
    """Run in the engine's process, which is the only one that imports torch."""
    os.environ |= environment
    from soothsay.server.engines.worker import run_worker

    run_worker(factory, pipe)


def read_messages(pipe: Connection, receive: Callable[[Received], None]) -> None:
    """Pass on messages until the process closes the pipe."""
    try:
        while True:
            receive(pipe.recv())
    except (EOFError, OSError):
        pass
    finally:
        receive(None)


def write_messages(pipe: Connection, outbox: SimpleQueue[Incoming | None]) -> None:
    """Send messages until one is None, which tells the process to end."""
    message: Incoming | None
    with suppress(OSError):
        while True:
            pipe.send(message := outbox.get())
            if message is None:
                return


@contextmanager
def safe_start() -> Iterator[None]:
    """Let processes started inside inherit `SAFE_PATH`, and that SIGINT and SIGTERM are blocked.

    Terminals, and some supervisors, signal every process of a group. The engine must finish the running
    answers first. The variable stays set, since other threads start processes too.
    """
    os.environ |= SAFE_PATH
    resource_tracker.ensure_running()  # starting a process starts it too, and that unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
