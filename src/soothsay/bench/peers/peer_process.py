"""Runs an engine of `engines` in a process of its own, and calls it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.errors import SoothsayError

SETTLE = 0.02
"""Seconds before each call, in which the engine called before can go to sleep."""


class PeerProcess:
    """An engine in a process of its own.

    An idle engine must not slow the others down. Threads that wait by spinning go to sleep within 10 ms
    (measured for all engines), and each call first waits for `SETTLE`.

    Args:
        name: the engine's name.
        setup: what to load; its paths must be absolute.
        python: the Python interpreter that runs it.
        log: the file for the engine's output.

    Raises:
        UnavailableError: the engine is not installed there, or does not support `setup`.
        SoothsayError: the process cannot be started, or fails.
    """

    def __init__(self, name: str, setup: Setup, python: str, log: Path):
        self.name, self.log = name, log
        if os.sep in python:  # not a name to look up: it may be relative to here, not to where it will run
            python = os.path.abspath(python)
        try:
            with log.open("w") as stderr:
                self._process = subprocess.Popen(
                    [python, "-m", "engines", name, json.dumps(asdict(setup))],
                    cwd=Path(__file__).parent,  # where `engines` is, and nothing of others
                    env={**os.environ, "PYTHONSAFEPATH": "", "OMP_NUM_THREADS": str(setup.threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    encoding="utf-8",
                )
        except OSError as error:
            raise SoothsayError(f"{name} cannot be run with {python} ({error.strerror})") from None
        try:
            about = self._receive()
        except BaseException:
            self.close()
            raise
        self.version: str = about["version"]
        self.modes: tuple[str, ...] = tuple(about["modes"])

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.communicate()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the `Peer`, such as "decode". Returns what it returns."""
        assert self._process.stdin is not None
        time.sleep(SETTLE)
        with suppress(BrokenPipeError):  # the process has ended; `_receive` reports it
            self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
            self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SoothsayError(f"{self.name} ended with {' '.join(last) or 'nothing said'}; see {self.log}")
        reply = json.loads(line)
        if "unavailable" in reply:
            raise UnavailableError(reply["unavailable"])
        if "error" in reply:
            raise SoothsayError(f"{self.name}: {reply['error']}; see {self.log}")
        return reply["result"]
