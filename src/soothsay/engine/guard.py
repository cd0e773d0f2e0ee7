"""Who may use an engine: a lock that also says who must not use it any more, and torch's defaults."""

import os
import threading

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


class Guard:
    """A re-entrant lock for the threads of one process. A context manager.

    `check` and entering raise `RuntimeError` in a process that was forked from it, and after `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self.closed = False

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()
        if self.closed:  # by the thread that had the lock
            self._lock.release()
            self.check()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise `RuntimeError` if the lock must not be taken. Never waits."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self.closed:
            raise RuntimeError(CLOSED)

    def take_over(self) -> None:
        """Let this process, a fork, use the lock. At the fork there must have been one thread only."""
        self._process = os.getpid()
