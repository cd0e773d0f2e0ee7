"""Layers that other processes run, as the engine sees them: their processes, and their layers."""

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from soothsay.config import DType, KVDType
from soothsay.core.cache import KVPool, Move
from soothsay.errors import ModelError, StageError, type_of
from soothsay.handshake import call
from soothsay.model.pipeline.frames import Frame, FrameError, receive, send, written_moves, written_rows
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.stage import PoolSize, StagePass
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model
from soothsay.model.weights.numeric_mode import described_mode
from soothsay.own_process import module_environment

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

    def run(self, at: StagePass) -> dict[int, Tensor]:
        """See `Layers`. Raises `RuntimeError` with the words of an error there."""
        x, batch, cache, layers, taps, embeddings = at
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


MIN_KEY = 16
"""The shortest key, in bytes."""


@dataclass(frozen=True, slots=True, repr=False)
class StageAddress:
    """Where `soothsay stage` waits for an engine, and the key that it wants."""

    host: str
    port: int
    key: bytes

    @classmethod
    def parse(cls, text: str, key: bytes) -> Self:
        """Read `HOST:PORT`. Raises `ModelError`."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ModelError(f"{text!r} is not the address of a stage: HOST:PORT")
        return cls(host.strip("[]"), int(port), key)

    def open(self) -> RemoteStage:
        """See `StagePlace`."""
        place = f"{self.host}:{self.port}"
        try:
            return RemoteStage(call(self.host, self.port, self.key), place)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise ModelError(
                f"no stage answers at {place}: {error}. Start 'soothsay stage' there, with the same key; one "
                "that serves another engine does not answer"
            ) from None


def read_key(file: Path) -> bytes:
    """The key in a file, without spaces around it. Raises `ModelError`."""
    try:
        with file.open("rb") as opened:
            key = opened.read(4096).strip()
    except OSError as error:
        raise ModelError(f"the key of stages cannot be read: {error}") from None
    if len(key) < MIN_KEY:
        raise ModelError(f"{file} has a key of {len(key)} bytes; at least {MIN_KEY} are needed")
    return key


@runtime_checkable
class StagePlace(Protocol):
    """A place that provides a process to run layers."""

    def open(self) -> RemoteStage:
        """A process without layers. Raises `ModelError` if there is none."""
        ...


Stages = int | Sequence[StagePlace]
"""The number of processes that share the layers, the engine's own included, all on this machine. Or
the places of the other processes, which get the layers after the engine's own."""


def load_pipeline(
    model: str | os.PathLike[str],
    stages: Stages,
    dtype: DType = "auto",
    kernels: str = "auto",
    max_context: int | None = None,
    kv_dtype: KVDType = "auto",
) -> Transformer:
    """Load a model of which other processes run some layers. They end with it.

    Each process reads its own layers only. Rows are computed by the same kernels as in one process, so they
    have the same bits.

    Args:
        model: as `open_checkpoint` takes it. Other machines need it under the same name.
        stages: the other processes.
        dtype: see `load_model`.
        kernels: see `chosen_kernels`.
        max_context: see `load_model`.
        kv_dtype: see `load_model`.

    Raises `ModelError` if a process cannot load its layers, cannot be reached, or has another numeric mode.
    """
    if not isinstance(stages, int | Sequence) or isinstance(stages, str):
        raise TypeError(f"stages are a number or a list of places, not {type_of(stages)}")
    for place in () if isinstance(stages, int) else stages:
        if not isinstance(place, StagePlace):
            raise TypeError(f"a place of a stage is a StageAddress, not {type_of(place)}")
    checkpoint = open_checkpoint(model)
    count = stages if isinstance(stages, int) else len(stages) + 1
    own, *others = split_layers(read_model_config(checkpoint), count)
    rest: list[RemoteStage] = []
    try:
        for number, layers in enumerate(others):
            rest.append(_start() if isinstance(stages, int) else stages[number].open())
            rest[-1].load(
                layers,
                model=os.path.abspath(model) if os.path.exists(model) else os.fspath(model),
                dtype=dtype,
                kernels=kernels,
                max_context=max_context,
                kv_dtype=kv_dtype,
                threads=torch.get_num_threads(),
            )
        loaded = load_model(checkpoint, dtype, "cpu", kernels, max_context, own, kv_dtype=kv_dtype)
        mode = described_mode(loaded.blocks, loaded.kernels, loaded.dtype, loaded.kv_dtype, loaded.bits)
        for stage in rest:
            stage.wait(mode)
    except BaseException:
        for stage in rest:
            stage.close()
        raise
    loaded.rest = rest
    return loaded


def _start() -> RemoteStage:
    """A process of this machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "soothsay.model.pipeline.stage_process", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=module_environment(),
            start_new_session=True,  # signals of a terminal are for the engine, which ends it
        )
        return RemoteStage(Connection(ours.detach()), f"process {process.pid}", process)


def _has_file(stream: object) -> bool:
    """Whether a stream is a file of the system, and not a test's or a notebook's."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


def split_layers(spec: ModelSpec, count: int) -> list[range]:
    """Split a model's layers into `count` consecutive ranges with about equal weights.

    The first range has the output head too. Layers that share keys and values stay together.

    Raises `ModelError` if the model has fewer places to split it.

    Example:
        >>> split_layers(spec, 2)  # of 4 equal layers, and a head as large as 2 of them
        [range(0, 1), range(1, 4)]
    """
    head = spec.vocab_size * spec.hidden_size
    sums = list(accumulate((layer.num_parameters(spec.hidden_size) for layer in spec.layers), initial=head))
    cuts = [i for i in range(1, spec.num_layers) if _may_split(spec, i)]
    if not 1 <= count <= len(cuts) + 1:
        raise ModelError(
            f"a model with {spec.num_layers} layers can have 1 to {len(cuts) + 1} stages, not {count}"
        )
    ends = [0]
    for number in range(1, count):
        left = [cut for cut in cuts if cut > ends[-1]]
        left = left[: len(left) - (count - 1 - number)]  # one for each later border
        ends.append(min(left, key=lambda cut: abs(sums[cut] - sums[-1] * number / count)))
    return [range(*pair) for pair in pairwise([*ends, spec.num_layers])]


def _may_split(spec: ModelSpec, place: int) -> bool:
    """Whether no layer from `place` on reads keys and values of one before it."""
    return all(source >= place for source in spec.kv_layers[place:])
