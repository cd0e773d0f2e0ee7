"""Who may use an engine: a lock that also says who must not use it any more, and torch's defaults."""

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # without enums, which take 8 us a step
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

FORKED = (
    "this LLM was loaded before the process forked, and its threads and locks do not survive a fork: load it "
    'in the child, or start processes with multiprocessing.get_context("spawn")'
)

CLOSED = "this LLM is closed; make another one"


def check_torch() -> None:
    """Raise `RuntimeError` if torch makes other tensors than of float32 on the CPU, which kernels expect."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    if device.type != "cpu" or dtype != torch.float32:
        raise RuntimeError(
            f"torch makes new tensors of {dtype} on {device} here, and an LLM needs float32 on the CPU: call "
            "torch.set_default_dtype(torch.float32) and torch.set_default_device(None) first; the options "
            "dtype and device are for the model"
        )


HELD = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]
"""Signals whose handlers often raise: for Ctrl-C, for an end that tidies up, for a time limit."""


class Guard:
    """A re-entrant lock for the threads of one process. A context manager.

    `check` and entering raise `RuntimeError` in a process that was forked from it, and after `close`.

    Handlers of the signals `HELD` run when the main thread has released the lock. In the middle of a step,
    one that raises or cancels would leave requests half changed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._depth = 0  # how often the main thread has entered
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # of the signals held back
        self._came: dict[int, FrameType | None] = {}  # signals, and where they came
        self.closed = False

    def __enter__(self) -> None:
        self.check()
        self._hold_signals()
        self._lock.acquire()
        if self.closed:  # by the thread that had the lock
            self.__exit__()
            self.check()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._let_signals_go()

    def _hold_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            self._handlers = {number: own for number in HELD if callable(own := getsignal(number))}
            try:
                for number in self._handlers:
                    set_handler(number, self._came.__setitem__)
            except BaseException:  # by a signal that is not held back yet
                self._restore()
                raise
        self._depth += 1

    def _let_signals_go(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._restore()
            while self._came:
                number, frame = self._came.popitem()
                self._handlers[number](number, frame)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            set_handler(number, handler)

    def check(self) -> None:
        """Raise `RuntimeError` if the lock must not be taken. Never waits."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self.closed:
            raise RuntimeError(CLOSED)

    def take_over(self) -> None:
        """Let this process, a fork, use the lock. At the fork there must have been one thread only."""
        self._process = os.getpid()
