"""Runs commands of `soothsay` in forks of a process that has imported torch, which takes most of a start.

Signals, limits, the environment and what is printed are those of a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["soothsay.server.engines.worker", "soothsay.cli.app"])


class Command:
    """`soothsay ARGUMENTS` in a process.

    Args:
        arguments: of the command.
        environment: all variables of the process; None: those of this process.
        limits: limits of resources, such as `resource.RLIMIT_NOFILE`.
        log: the file for what it prints to stderr; None: a temporary one.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        limits: Mapping[int, int] | None = None,
        log: Path | None = None,
    ):
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name) / "out"
        self._err = log or Path(self._folder.name) / "err"
        for file in (self._out, self._err):
            file.write_text("")
        files = str(self._out), str(self._err)
        own = dict(os.environ if environment is None else environment)
        self._said: tuple[int, str, str] | None = None
        self._process: BaseProcess = WARM.Process(
            target=_run, args=(arguments, own, dict(limits or {}), files)
        )
        self._process.start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.exitcode is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        assert self._process.pid is not None
        if not self.ended:
            os.kill(self._process.pid, number)

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        """Wait for the end. Returns the exit code, stdout and stderr. Kills a process that takes too long."""
        if self._said is not None:
            return self._said
        self._process.join(timeout)
        if not self.ended:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        self._said = code, self._out.read_text(), self._err.read_text()
        self._folder.cleanup()
        return self._said


def _run(
    arguments: tuple[str, ...], environment: dict[str, str], limits: dict[int, int], files: tuple[str, str]
) -> None:
    """Become the command."""
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["soothsay", *arguments]
    from soothsay.cli.app import main

    main()
