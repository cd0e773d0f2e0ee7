"""Engines that are forks of one process, which has loaded the model: its weights are in memory once.

Linux only. A fork needs no time to load, so an engine that has died is back at once.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self

from soothsay.errors import SoothsayError
from soothsay.server.engines.engine_process import GRACE, SPAWN, EngineProcess, Fork, pin, safe_start
from soothsay.server.http.json_log import log_to_stderr

if TYPE_CHECKING:
    from soothsay.llm import LLM


class _News(NamedTuple):
    """What a nursery tells of a fork: its process id once it runs, or how it has ended."""

    number: int
    pid: int | None = None
    exitcode: int | None = None


class Nursery:
    """A process that loads the model and then only forks engines. A context manager.

    The kernel copies a page of memory when one of the processes writes to it. Nobody writes to weights, so
    all engines share them, repacked ones too. If the nursery dies, its engines go on. The next engine then
    starts another one.

    Args:
        factory: makes the `LLM`. It must be picklable, and must not start threads of OpenMP.
        cores: of each engine.
        environment: variables of the processes.
    """

    def __init__(
        self, factory: Callable[[], LLM], cores: int, environment: Mapping[str, str] = MappingProxyType({})
    ):
        self._arguments = factory, cores, dict(environment)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # replicas start engines in threads of their own

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # it has died
            self._pipe.send(None)
        self._process.join(GRACE)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def engine(self) -> ForkedEngine:
        """An engine that has not started."""
        return ForkedEngine(self)

    def fork(self, theirs: Connection) -> Fork:
        """Ask for a process with one end of a pipe. Raises `OSError` if the nursery has just died."""
        with self._lock:
            if not self._process.is_alive():
                self._pipe.close()
                self._start()
            fork = Fork(self._process.pid)
            number = next(self._numbers)
            self._forks[number] = fork
            self._pipe.send(number)
            reduction.send_handle(self._pipe, theirs.fileno(), self._process.pid)
        return fork

    def _start(self) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._forks: dict[int, Fork] = {}
        arguments = *self._arguments, theirs
        self._process = SPAWN.Process(target=_nurse, args=arguments, name="nursery", daemon=True)
        with safe_start():
            self._process.start()
        theirs.close()
        threading.Thread(target=_hear, args=(self._pipe, self._forks), name="nursery", daemon=True).start()


class ForkedEngine(EngineProcess):
    """An engine that is a fork of a nursery. It is an `Engine`, and documents no more than that."""

    def __init__(self, nursery: Nursery):
        self._nursery = nursery

    def _launch(self, theirs: Connection) -> Fork:
        return self._nursery.fork(theirs)


def _hear(pipe: Connection, forks: dict[int, Fork]) -> None:
    """Take in what a nursery tells of its forks, until it ends. Runs in a thread of the server."""
    with suppress(EOFError, OSError, TypeError):  # a pipe that was closed meanwhile
        while True:
            news: _News = pipe.recv()
            if news.pid is None:
                forks.pop(news.number).end(news.exitcode)
            else:
                forks[news.number].pid = news.pid
    _outlive([*forks.values()])


def _outlive(forks: Sequence[Fork]) -> None:
    """Wait for the ends of engines whose nursery has died. Until then, they can be killed."""
    running: dict[int, Fork] = {}  # by file descriptor
    for fork in forks:
        try:
            running[os.pidfd_open(fork.pid or 0)] = fork
        except OSError:  # it has ended too
            fork.end(None)
    while running:
        for ready in wait([*running]):
            if isinstance(ready, int):
                os.close(ready)
                running.pop(ready).end(None)


def _nurse(factory: Callable[[], LLM], cores: int, environment: dict[str, str], pipe: Connection) -> None:
    """Run in the nursery: load the model, then fork an engine for each number that comes."""
    os.environ |= environment
    log_to_stderr()  # what loading and pinning warn of
    import torch

    torch.set_num_threads(1)  # a fork would lack OpenMP's further threads, and wait for them
    failure: SoothsayError | None = None
    try:
        llm = factory()
    except SoothsayError as error:
        failure = error
    gc.collect()
    gc.freeze()  # the collector would write to all objects, and so copy their pages
    children: dict[int, tuple[int, int]] = {}  # number and process id, by file descriptor
    with suppress(EOFError, OSError):  # the server has ended
        while True:
            for ready in wait([pipe, *children]):
                if isinstance(ready, int):
                    number, pid = children.pop(ready)
                    os.close(ready)
                    pipe.send(_News(number, exitcode=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                    continue
                if (number := pipe.recv()) is None:
                    return
                with Connection(reduction.recv_handle(pipe)) as theirs:
                    if failure is not None:
                        theirs.send(failure)
                        pipe.send(_News(number, exitcode=1))
                    elif (pid := os.fork()) == 0:
                        pipe.close()
                        _run(llm, cores, theirs)
                    else:
                        children[os.pidfd_open(pid)] = number, pid
                        pipe.send(_News(number, pid))


def _run(llm: LLM, cores: int, theirs: Connection) -> None:
    """Run in a fork: step the engine until the server hangs up."""
    from soothsay.server.engines.worker import run_worker

    try:
        pin(cores)
        llm.engine.lock.take_over()
        run_worker(lambda: llm, theirs)
    finally:
        os._exit(1)  # never return into the loop of the nursery
