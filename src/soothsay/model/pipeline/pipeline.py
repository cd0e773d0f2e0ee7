"""Starts the processes of a pipeline, and loads each one's layers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, Self

import torch

from soothsay.config import DType, KVDType
from soothsay.errors import ModelError
from soothsay.handshake import call
from soothsay.model.pipeline.remote_stage import RemoteStage
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model
from soothsay.model.weights.numeric_mode import described_mode
from soothsay.own_process import module_environment

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
