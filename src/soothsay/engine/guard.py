"""A lock that also says who must not use an engine."""

from __future__ import annotations

import os
import threading

FORKED = (
    "this LLM was loaded before the process forked, and its threads and locks do not survive a fork: load it "
    'in the child, or start processes with multiprocessing.get_context("spawn")'
)


class Guard:
    """A re-entrant lock for the threads of one process. A context manager.

    `check` and entering raise `RuntimeError` in a process that was forked from it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise `RuntimeError` if the lock must not be taken. Never waits."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)

    def take_over(self) -> None:
        """Let this process, a fork, use the lock. At the fork there must have been one thread only."""
        self._process = os.getpid()
