"""Layers that another process runs, seen from the engine."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired
from typing import Any

from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import KVPool, Move
from soothsay.errors import ModelError, StageError
from soothsay.model.pipeline.frames import Frame, FrameError, receive, send, written_moves, written_rows
from soothsay.model.stage import PoolSize

SILENCE = 600.0
"""Seconds after which a process that does not answer counts as lost. A step takes seconds at most."""

GRACE = 5.0
"""Seconds in which a process of this machine can end by itself before it is killed."""


class RemoteStage:
    """Layers that another process runs. It is a `Stage`, and documents no more than that.

    Any thread may use it. A call that wants an answer excludes the others.

    Args:
        pipe: to the process.
        place: where it runs, for people.
        process: the process, if it was started for this stage. It ends with the stage.
    """

    memory = 0
    machine = ""
    layers = range(0)

    def __init__(self, pipe: Connection, place: str, process: Popen[bytes] | None = None):
        self._pipe, self.place = pipe, place
        self._lock = threading.RLock()
        self._pools: weakref.WeakKeyDictionary[KVPool, int] = weakref.WeakKeyDictionary()
        self._num_pools = 0
        self._unused: deque[int] = deque()  # pools to free with the next message
        self._close = weakref.finalize(self, _end, pipe, process)

    def load(self, layers: range, **options: Any) -> None:
        """Ask the process to load layers of a model. Returns at once.

        Args:
            layers: their numbers.
            options: `model`, `dtype`, `kernels`, `max_context`, `kv_dtype` and `threads`.
        """
        self.layers = layers
        self._tell(Frame("load", {"layers": [layers.start, layers.stop], **options}))

    def wait(self, mode: str) -> None:
        """Wait until the layers are loaded.

        Args:
            mode: the numeric mode that they must have.

        Raises `ModelError` if they cannot be loaded, or have another mode.
        """
        try:
            loaded = self._answer().fields
        except RuntimeError as error:
            raise ModelError(str(error)) from None
        if loaded["mode"] != mode:
            raise ModelError(
                f"{self._name} computes in another numeric mode: {loaded['mode']!r}; here it is "
                f"{mode!r}. Install the same versions; for unlike processors choose the kernels 'portable'"
            )
        self.memory, self.machine = int(loaded["memory"]), str(loaded["machine"])

    def follow(self, cache: KVPool, size: PoolSize) -> None:
        """See `Stage`."""
        with self._lock:
            number = self._num_pools = self._num_pools + 1
            self._pools[cache] = number
            weakref.finalize(cache, self._unused.append, number)
            self._tell(Frame("pool", {"pool": number, "size": asdict(size)}))

    def run(
        self,
        x: Tensor,
        batch: Batch,
        cache: KVPool | None,
        layers: Sequence[int],
        taps: Collection[int],
        embeddings: Tensor | None,
    ) -> dict[int, Tensor]:
        """See `Layers`. Raises `RuntimeError` with the words of an error there."""
        fields = {
            "pool": None if cache is None else self._pools[cache],
            "layers": list(layers),
            "taps": [tap for tap in taps if tap in layers],
        }
        tensors = [written_rows(batch.requests), x, *([] if embeddings is None else [embeddings])]
        with self._lock:
            self._tell(Frame("run", fields, tensors))
            answer = self._answer()
        return dict(zip(answer.fields["streams"], answer.tensors, strict=True))

    def commit(self, cache: KVPool, moves: Sequence[Move]) -> None:
        """See `Layers`. Does not wait for the process."""
        has_news = cache.states is not None or any(
            [*move.sources] != [*range(move.start, move.start + len(move.sources))] for move in moves
        )
        if moves and has_news:
            self._tell(Frame("commit", {"pool": self._pools[cache]}, [written_moves(moves)]))

    def copy_state(self, cache: KVPool, source: int, target: int) -> None:
        """See `Layers`. Does not wait for the process."""
        self._tell(Frame("copy", {"pool": self._pools[cache], "source": source, "target": target}))

    def close(self) -> None:
        """See `Stage`."""
        self._close()

    @property
    def _name(self) -> str:
        return f"the stage with layers {self.layers.start} to {self.layers.stop - 1} ({self.place})"

    def _tell(self, frame: Frame) -> None:
        with self._lock:
            try:
                while self._unused:
                    send(self._pipe, Frame("free", {"pool": self._unused.popleft()}))
                send(self._pipe, frame)
            except OSError as error:
                raise self._lost(error) from None

    def _answer(self) -> Frame:
        """The answer to the last frame. Raises `RuntimeError` if it is an error."""
        try:
            if not self._pipe.poll(SILENCE):
                raise TimeoutError(f"it has said nothing for {SILENCE:.0f} seconds")
            answer = receive(self._pipe)
        except (EOFError, OSError, FrameError) as error:
            raise self._lost(error) from None
        if answer.kind == "error":
            raise RuntimeError(f"{self._name}: {answer.fields['message']}")
        return answer

    def _lost(self, error: Exception) -> StageError:
        self.close()  # after half a message, nothing else can be understood
        reason = str(error) or "its process has ended"
        return StageError(f"{self._name} is lost: {reason}. See what it printed, and load the model again")


def _end(pipe: Connection, process: Popen[bytes] | None) -> None:
    """Hang up, and end a process that was started for the stage."""
    with suppress(OSError):
        pipe.close()
    if process is not None:
        try:
            process.wait(GRACE)
        except TimeoutExpired:
            process.kill()
            process.wait()
