"""The process that runs some layers of a model for an engine in another process.

`python -m soothsay.model.pipeline.stage_process FD` serves the engine at the other end of a socket.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

import torch

from soothsay.core.cache import KVPool
from soothsay.errors import SoothsayError
from soothsay.handshake import CALLERS, Caller, CallerGate
from soothsay.machine import available_memory
from soothsay.model.pipeline.frames import Frame, FrameError, read_moves, read_rows, receive, send
from soothsay.model.stage import PoolSize, StagePass
from soothsay.model.transformer import LocalStage
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_stage
from soothsay.model.weights.numeric_mode import described_mode

log = logging.getLogger("soothsay.stage")

MAX_THREADS = 1 << 12
"""Limit of threads that an engine may ask for."""

MAX_WAITING = 8
"""Limit of engines that wait while another one is served. The oldest ones have given up."""


def serve_engine(pipe: Connection) -> None:
    """Run layers for the engine at the other end of a pipe, until it hangs up. The engine is trusted."""
    served: ServedStage | None = None
    failure: str | None = None  # of a message without an answer: the next answer tells it
    with closing(pipe), torch.inference_mode():
        try:
            while True:
                frame, answer = receive(pipe), None
                try:
                    if frame.kind == "load":
                        served, answer = _load(frame)
                    elif served is None:
                        raise FrameError("there are no layers yet")
                    else:
                        answer = served.act(frame)
                except Exception as error:  # of a step; the engine finds out which request is to blame
                    log.error("%s failed", frame.kind, exc_info=not isinstance(error, SoothsayError))
                    failure = failure or f"{type(error).__name__}: {error}"
                if frame.kind in ("load", "run"):
                    failed = Frame("error", {"message": failure})
                    send(pipe, failed if answer is None or failure is not None else answer)
                    failure = None
        except (EOFError, OSError):
            return
        except FrameError as error:
            log.error("hung up", extra={"reason": str(error)})


class ServedStage:
    """Layers, and the pools that belong to those of an engine.

    Args:
        stage: the layers.
    """

    def __init__(self, stage: LocalStage):
        self._stage, self._pools = stage, dict[int, KVPool]()

    def act(self, frame: Frame) -> Frame | None:
        """Do what a message says; return the answer to "run". Raises `FrameError` for other messages."""
        actions: dict[str, Callable[[Frame], Frame | None]] = {
            "run": self._run,
            "commit": self._commit,
            "copy": self._copy,
            "pool": self._add_pool,
            "free": self._free,
        }
        if frame.kind not in actions:
            raise FrameError(f"there is no message {frame.kind!r}")
        try:
            return actions[frame.kind](frame)
        except (KeyError, TypeError) as error:
            raise FrameError(f"{frame.kind}: {error!r}") from error

    def _run(self, frame: Frame) -> Frame:
        fields, (plan, x, *more) = frame.fields, frame.tensors
        pool = None if fields["pool"] is None else self._pools[fields["pool"]]
        rows = read_rows(plan, None if pool is None else _num_blocks(pool))
        batch = self._stage.pack(rows, 1 if pool is None else pool.block_size)
        own, size = self._stage.layers, self._stage.spec.stream_size
        if x.dtype != torch.float32 or x.shape != (len(batch.tokens), size):
            raise FrameError(f"hidden states of the shape {list(x.shape)} for {len(batch.tokens)} rows")
        if not fields["layers"] or not all(layer in own for layer in fields["layers"]):
            raise FrameError(f"layers {fields['layers']} of {own}")
        embeddings = more[0] if more else None
        run = StagePass(x, batch, pool, fields["layers"], fields["taps"], embeddings)
        streams = self._stage.run(run)
        return Frame("ran", {"streams": list(streams)}, list(streams.values()))

    def _commit(self, frame: Frame) -> None:
        pool, (plan,) = self._pools[frame.fields["pool"]], frame.tensors
        self._stage.commit(pool, read_moves(plan, _num_blocks(pool)))

    def _copy(self, frame: Frame) -> None:
        fields = frame.fields
        self._stage.copy_state(self._pools[fields["pool"]], fields["source"], fields["target"])

    def _add_pool(self, frame: Frame) -> None:
        self._pools[frame.fields["pool"]] = self._stage.new_cache(PoolSize(**frame.fields["size"]))

    def _free(self, frame: Frame) -> None:
        self._pools.pop(frame.fields["pool"], None)


def _num_blocks(pool: KVPool) -> int:
    return pool.num_slots // pool.block_size


def _load(frame: Frame) -> tuple[ServedStage, Frame]:
    """Load the layers that an engine asks for."""
    fields = frame.fields
    torch.set_num_threads(min(max(int(fields["threads"]), 1), MAX_THREADS))
    checkpoint, layers = open_checkpoint(fields["model"]), range(*fields["layers"])
    options = fields["dtype"], fields["kernels"], fields["max_context"], fields["kv_dtype"]
    stage, bits = load_stage(checkpoint, layers, *options)
    mode = described_mode(stage.blocks, stage.kernels, stage.dtype, stage.kv_dtype, bits)
    about = {"mode": mode, "memory": available_memory(), "machine": platform.node()}
    return ServedStage(stage), Frame("loaded", about)


def listen(host: str, port: int, key: bytes, tell: Callable[[str, int], None]) -> None:
    """Serve engines that have the key, one after the other, for ever.

    Args:
        host: the address to listen on.
        port: 0: any free one.
        key: that engines must have.
        tell: is called with the address, once engines may call.

    Raises `SoothsayError` if the address cannot be had.
    """
    try:
        listening = socket.create_server((host, port), backlog=CALLERS)
    except OSError as error:
        raise SoothsayError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    callers: SimpleQueue[Caller] = SimpleQueue()

    def admit(caller: Caller) -> None:
        callers.put(caller)
        with suppress(Empty):
            while callers.qsize() > MAX_WAITING:
                callers.get_nowait().socket.close()

    with CallerGate(listening, key, admit):
        tell(*listening.getsockname()[:2])
        while True:
            caller = callers.get()
            try:
                pipe = caller.answer()
            except OSError:  # it waited in vain while another engine was served
                continue
            log.info("engine connected", extra={"address": caller.address})
            serve_engine(pipe)
            log.info("engine gone", extra={"address": caller.address})


if __name__ == "__main__":
    serve_engine(Connection(int(sys.argv[1])))
