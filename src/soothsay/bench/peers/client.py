"""The other end of `engines`: an engine in a process of its own, as if it were here."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from soothsay.bench.peers.engines.base import Setup, UnavailableError
from soothsay.errors import SoothsayError

SETTLE = 0.02
"""Seconds that the engine before is given to fall asleep."""


class Client:
    """Passes calls on to an engine.

    An engine without work disturbs nobody: threads that wait by spinning fall asleep within 10 ms (measured
    for all of them), and each call waits for longer than that before it is passed on.

    Args:
        name: of the engine.
        setup: its paths have to be absolute.
        python: the interpreter to run it with.
        log: what the engine prints goes there.

    Raises:
        UnavailableError: the engine is not installed there, or cannot do what `setup` wants.
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
                    cwd=Path(__file__).parent,  # where `engines` is
                    env={**os.environ, "OMP_NUM_THREADS": str(setup.threads)},
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

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self) -> None:
        """See `Peer`, as for all that follow."""
        self._call("load")

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """Seconds of `count` steps behind the prompt, and `count + 1` tokens."""
        seconds, tokens = self._call("decode", ids, count)
        return seconds, tokens

    def prompt(self, ids: list[int]) -> float:
        """Seconds of a prompt and one token."""
        seconds: float = self._call("prompt", ids)
        return seconds

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """Seconds of passes of `rows` tokens behind the prompt."""
        seconds: list[float] | None = self._call("verify", ids, rows, times)
        return seconds

    def generate(self, ids: list[int], count: int, mode: str) -> tuple[float, list[int]]:
        """Seconds and tokens of an answer."""
        seconds, tokens = self._call("generate", ids, count, mode)
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.communicate()

    def _call(self, call: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        time.sleep(SETTLE)
        try:
            self._process.stdin.write(json.dumps({"call": call, "args": args}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the missing reply says so
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
