"""Records what layers compute as programs of the library: the layers' own `forward`, without numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from soothsay.model.native.native_linear import Mixture, NativeLinear
from soothsay.model.native.operations import NOTHING, NativeOperations
from soothsay.model.native.program import EMBEDDING, INPUTS, SCRATCH, STREAM, Operation, Reads
from soothsay.model.native.recorded import Buffer, Program, RecordedBatch, RecordedPass, Value
from soothsay.model.ops.kernels import StockKernels

ALIGNED = 64
"""Bytes to which values are aligned."""

IN_PLACE = {
    **{"add_norm": (0, 2), "sigmoid_gate": (0, 2), "scale": (0, 1), "grow": (0, 1), "add_gated": (0, 3)},
}
"""Operations that may write an output over an input: the numbers of both among the operands."""


class Recorder(NativeOperations):
    """Records operations of one layer. For the methods see `Kernels`."""

    def __init__(self) -> None:
        self.ops: list[Operation] = []

    def _new(self, like: Any, dtype: torch.dtype, *shape: int) -> Any:
        sizes = shape or like.sizes
        width = sizes[0] * sizes[1] if len(sizes) == 2 else sizes[0]
        head = sizes[-1] if len(sizes) == 2 else 0
        return Value(Buffer(width * dtype.itemsize), dtype, sizes, width, 0, head)

    def _emit(self, op: Operation, reads: Reads = NOTHING) -> None:
        numbers = op.numbers
        if isinstance(reads.rope, int):  # the number of the rope comes last
            numbers = (*numbers, reads.rope)
        if isinstance(reads.batch, RecordedBatch):  # that of the paths too
            numbers = (*numbers, reads.batch.sight)
        self.ops.append(op._replace(numbers=numbers))

    def _whole(self, x: Any) -> Any:
        if x.is_whole:
            return x
        out = self._new(x, x.dtype)
        self._emit(Operation("copy", (x, out)))
        return out

    def apply(self, layer: nn.Module, x: Any) -> Any:
        """See `Kernels`."""
        out = self._new(x, cast(torch.dtype, layer.dtype), cast(int, layer.out_features))
        if isinstance(layer, NativeLinear):
            self._emit(Operation("linear", (self._whole(x), out), (layer,)))
        else:
            self.ops.append(Operation("", (x, out), function=layer))
        return out

    def apply_heads(self, layers: nn.ModuleList, x: Any) -> Any:
        """See `Kernels`."""
        each = [layer for layer in layers if isinstance(layer, NativeLinear)]
        out = self._new(x, cast(torch.dtype, layers[0].dtype), len(layers), cast(int, layers[0].out_features))
        if len(each) == len(layers):
            addresses = (c_void_p * len(each))(*(layer.address for layer in each))
            self._emit(Operation("linear_heads", (self._whole(x), out), (addresses,)))
        else:
            self.ops.append(Operation("", (x, out), function=partial(StockKernels().apply_heads, layers)))
        return out

    def mix(self, experts: Any, x: Any, scores: Any) -> Any:
        """See `Kernels`."""
        if not Mixture.fit(experts):
            scores = self.apply(experts.router, x) if scores is None else scores
            return self.compute(experts.mixed, x.sizes[-1], x, scores)
        if scores is None and not isinstance(experts.router, NativeLinear):
            scores = self.apply(experts.router, x)
        scores = None if scores is None else self._whole(self.cast(scores, torch.float32))
        out = self._new(x, torch.float32)
        self._emit(Operation("mix", (self._whole(x), scores, out), (Mixture(experts),)))
        return out

    def compute(self, function: Callable[..., Tensor], size: int, *inputs: Any) -> Any:
        """See `Kernels`."""
        out = self._new(inputs[0], torch.float32, size)
        self.ops.append(Operation("", (*inputs, out), function=function))
        return out

    def split(self, x: Any, sizes: Sequence[int], dim: int = 1) -> list[Any]:
        """See `Kernels`."""
        each = x.head if dim < len(x.sizes) else 1
        return [
            replace(x, sizes=_with(x.sizes, dim, size), begin=x.begin + first * each)
            for size, first in zip(sizes, accumulate(sizes, initial=0), strict=False)
        ]

    def cat(self, parts: Sequence[Any], dtype: torch.dtype, dim: int = 1) -> Any:
        """See `Kernels`."""
        sizes = [part.sizes[dim - 1] for part in parts]
        out = self._new(parts[0], dtype, *_with(parts[0].sizes, dim, sum(sizes)))
        for part, place in zip(parts, self.split(out, sizes, dim), strict=True):
            self._emit(Operation("copy", (part, place)))
        return out

    def heads(self, x: Any, size: int) -> Any:
        """See `Kernels`."""
        return replace(x, sizes=(x.sizes[0] // size, size), head=size)

    def flat(self, x: Any) -> Any:
        """See `Kernels`."""
        x = self._whole(x)
        return replace(x, sizes=(x.row,), head=0)


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """Sizes of a value with another one in dimension `dim`."""
    return *sizes[: dim - 1], size, *sizes[dim:]


def record(
    forward: Callable[[Any, Any, Any], Any],
    width: int,
    rope: int = 0,
    inputs: tuple[int, torch.dtype] | None = None,
    embedding: int | None = None,
) -> Program:
    """Record a layer.

    Args:
        forward: `forward(operations, x, layer_pass)` of a stream `[N, width]` float32 returns the next one.
        width: of the stream.
        rope: the number of the layer's rope.
        inputs: size and element type of `LayerPass.inputs`; None: there are none.
        embedding: size of `LayerPass.embedding`; None: there is none.
    """

    def outer(where: int, size: int, dtype: torch.dtype = torch.float32) -> Value:
        return Value(Buffer(size * dtype.itemsize, where), dtype, (size,), size)

    recorder, stream = Recorder(), outer(STREAM, width)
    given = None if inputs is None else outer(INPUTS, *inputs)
    at = RecordedPass(rope, given, None if embedding is None else outer(EMBEDDING, embedding))
    out = forward(recorder, stream, at)
    scratch = _place(recorder.ops, stream.buffer, out.buffer)
    ops = tuple(recorder.ops)
    if out.buffer.where != STREAM:
        ops += (Operation("copy", (out, stream)),)
    if not at.memory:
        return Program(ops, scratch, 0, None)
    ((heads, _, size), dtype) = at.memory[0].shape, at.memory[0].dtype
    return Program(ops, scratch, heads * size * dtype.itemsize, dtype)


def _place(ops: Sequence[Operation], stream: Buffer, final: Buffer) -> int:
    """Give buffers their places; returns the bytes a row of scratch memory."""
    seen = dict[Buffer, None]()
    for number, op in enumerate(ops):
        for value in op.operands:
            if value is not None:
                if value.buffer not in seen:
                    seen[value.buffer] = None
                    value.buffer.first = number
                value.buffer.last = number
    final.last = len(ops)
    live, whole = set[Buffer](), 0
    for number, op in enumerate(ops):
        live = {buffer for buffer in live if buffer.last >= number}
        source, target = _in_place(op)
        ends = source is not None and source.last == number and source.where in (SCRATCH, STREAM)
        if source and target and ends and target.first == number and target.size == source.size:
            target.where, target.place = source.where, source.place
            live.add(target)
        for value in op.operands:
            if value is None or value.buffer in live or value.buffer.where != SCRATCH:
                continue
            buffer = value.buffer
            if buffer.first == number:
                buffer.place = _room(live, buffer.size)
                live.add(buffer)
        whole = max(whole, max((b.place + _aligned(b.size) for b in live if b.where == SCRATCH), default=0))
    return whole


def _in_place(op: Operation) -> tuple[Buffer | None, Buffer | None]:
    """The buffer that an operation may overwrite, and the one that may take its place."""
    source, target = (op.operands[place] for place in IN_PLACE.get(op.kind, (0, 0)))
    if source is target or source is None or target is None or not source.is_whole:
        return None, None
    return source.buffer, target.buffer


def _room(live: set[Buffer], size: int) -> int:
    """The first place where `size` bytes a row are free."""
    place = 0
    for other in sorted((buffer for buffer in live if buffer.where == SCRATCH), key=lambda b: b.place):
        if place + size <= other.place:
            break
        place = max(place, other.place + _aligned(other.size))
    return place


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
