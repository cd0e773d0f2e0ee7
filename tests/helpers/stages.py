"""Stages of pipelines that run in threads of the test, so that no test waits for processes to start."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from soothsay.model.pipeline.pipeline import StageAddress
from soothsay.model.pipeline.stage_process import listen

KEY = b"a key of the test's own"


def stage_here() -> StageAddress:
    """Start a stage that waits for engines until the tests end."""
    known: SimpleQueue[tuple[str, int]] = SimpleQueue()
    tell = lambda host, port: known.put((host, port))  # noqa: E731
    threading.Thread(target=listen, args=("127.0.0.1", 0, KEY, tell), daemon=True).start()
    return StageAddress(*known.get(timeout=10), KEY)
