"""Decoder blocks as programs of the library."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, sizeof
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from soothsay.core.cache import LayerMemory
from soothsay.core.states import LayerStates
from soothsay.model.decoder.decoder_block import DecoderBlock, parts_of
from soothsay.model.native.layout import strand_plan
from soothsay.model.native.native_linear import address
from soothsay.model.native.operations import States, places_of
from soothsay.model.native.program import (
    EMBEDDING,
    INPUTS,
    KV_FORMATS,
    SCRATCH,
    STREAM,
    LayerRun,
    Op,
    Operation,
    Pass,
)
from soothsay.model.native.recorded import Program, Value
from soothsay.model.native.recorder import record
from soothsay.model.ops.kernels import BlocksPass

WITH_STATES = ("delta", "state_space", "convolve", "convolved", "scan")
"""Operations that read the plan of the strands."""


class _Segment(NamedTuple):
    """Operations of a program that run in one call, and what stock operations compute after them."""

    ops: int  # their address
    size: int  # number of them
    cut: Operation | None


class NativeProgram:
    """A program as the library reads it."""

    def __init__(self, program: Program):
        self.program = program  # has what the library reads
        self.has_states = any(op.kind in WITH_STATES for op in program.ops)
        parts, cuts = [list[Op]()], list[Operation | None]()
        for op in program.ops:
            if op.function is None:
                parts[-1].append(op.as_op())
            else:
                cuts.append(op)
                parts.append([])
        self._ops = [(Op * len(part))(*part) for part in parts]
        each = zip(self._ops, [*cuts, None], strict=True)
        self.segments = [_Segment(addressof(ops), len(ops), cut) for ops, cut in each]


class _Call(NamedTuple):
    """Segments that run in one call, and what stock operations compute after them, in which layer."""

    begin: int
    end: int
    cut: Operation | None
    layer: int


_Place = tuple[int | None, torch.dtype | None, tuple[int, ...]]
"""Where a layer's memory is: the address of keys and values, their element type, the fields of `States`."""


class _Bound(NamedTuple):
    """Layers that read and write the memory of a pool."""

    ends: Sequence[Callable[[], Tensor | None]]  # a tensor of the first layer and one of the last
    places: list[_Place]
    runs: Array[LayerRun]
    held: list[States]  # what has to outlive `runs`


class _Plan:
    """The programs of some layers, one after the other."""

    def __init__(self, layers: Sequence[int], programs: Sequence[NativeProgram]):
        runs, begin = list[LayerRun](), 0
        self.firsts, self.layers, self.calls = list[int](), list[int](), list[_Call]()
        for layer, native in zip(layers, programs, strict=True):
            self.firsts.append(len(runs))
            for segment in native.segments:
                runs.append(LayerRun(ops=segment.ops, count=segment.size))
                self.layers.append(layer)
                if segment.cut is not None:
                    self.calls.append(_Call(begin, len(runs), segment.cut, layer))
                    begin = len(runs)
        self.calls.append(_Call(begin, len(runs), None, layers[-1]))
        self.runs = (LayerRun * len(runs))(*runs)
        self.programs = dict(zip(layers, (native.program for native in programs), strict=True))
        self.scratch = max(program.scratch for program in self.programs.values())
        self.kv_size = max(program.kv_size for program in self.programs.values())
        self.has_states = any(native.has_states for native in programs)
        self._bound = _Bound([], [], self.runs, [])

    def bound(self, kv: Sequence[LayerMemory]) -> tuple[Array[LayerRun], list[States]]:
        """`runs` of layers that read and write `kv`, and what has to outlive them.

        Another pool may begin where one that is gone began.
        """
        tensors = [_tensor_of(kv[0]), _tensor_of(kv[-1])]
        ends, known, runs, held = self._bound
        if ends and ends[0]() is tensors[0] and ends[1]() is tensors[1]:  # a pool's layers stay together
            return _copied(runs), held
        places = [_place(memory) for memory in kv]
        if places != known:
            runs, held = _copied(self.runs), [States(*fields) for _, _, fields in places]
            for run, layer in zip(runs, self.layers, strict=True):
                run.kv, dtype, fields = places[layer]
                run.format = 0 if dtype is None else KV_FORMATS[dtype]
                run.states = addressof(held[layer]) if fields else None
        # at once, since another thread may run these layers too
        self._bound = _Bound([weakref.ref(tensor) for tensor in tensors], places, runs, held)
        return _copied(runs), held

    def within(self, place: int) -> tuple[Array[LayerRun], list[States]]:
        """`runs` of layers that read and write memory within the pass, one after the other, at `place`."""
        runs = _copied(self.runs)
        for run, layer in zip(runs, self.layers, strict=True):
            dtype = self.programs[layer].kv_dtype
            run.kv, run.format = place, 0 if dtype is None else KV_FORMATS[dtype]
        return runs, []


class NativeBlocks:
    """Computes `Blocks.forward` in one call, and in one more at each cut, with the bits of `compute`.

    Args:
        run: the library's `soothsay_run`.
        blocks: of one decoder.
        adapt: see `Kernels.record`.
    """

    def __init__(
        self,
        run: Callable[..., None],
        blocks: Sequence[DecoderBlock],
        adapt: Callable[[Any], Any] = lambda ops: ops,
    ):
        self._run, self._width = run, blocks[0].width
        self.count = len(blocks)
        kinds = (None,) if blocks[0].in_features is None else (torch.float32, torch.bfloat16)
        self._programs = {kind: [_program(block, kind, adapt) for block in blocks] for kind in kinds}
        self._plans: dict[tuple[torch.dtype | None, tuple[int, ...]], _Plan] = {}

    def programs(self, inputs: torch.dtype | None = None) -> list[NativeProgram]:
        """The program of each block, where attention reads rows of its own of this element type."""
        return self._programs[inputs]

    def _plan(self, inputs: torch.dtype | None, layers: tuple[int, ...]) -> _Plan:
        if (inputs, layers) not in self._plans:
            programs = self.programs(inputs)
            self._plans[inputs, layers] = _Plan(layers, [programs[layer] for layer in layers])
        return self._plans[inputs, layers]

    def __call__(self, at: BlocksPass) -> dict[int, Tensor]:
        """See `RecordedBlocks`."""
        x, ropes, batch, kv, layers, taps, embeddings, inputs, adapters = at
        plan = self._plan(None if inputs is None else inputs.dtype, tuple(layers))
        rows, stream = len(x), x.clone()
        scratch = torch.empty(rows * (plan.scratch + plan.kv_size), dtype=torch.uint8)
        made = Pass(rows, batch.positions.data_ptr(), batch.slots.data_ptr())
        made.read_paths(batch)
        made.read_ropes(ropes)
        made.stream, made.inputs, made.scratch = stream.data_ptr(), address(inputs), scratch.data_ptr()
        made.stream_size, made.adapters = self._width, address(adapters)
        if plan.has_states:
            made.plan = strand_plan(batch.strands)
        pool = None if kv is None else next((own for own, _ in map(parts_of, kv) if own is not None), None)
        made.pool_slots = rows if kv is None else 0 if pool is None else pool.shape[1]
        runs, _held = plan.within(scratch.data_ptr() + rows * plan.scratch) if kv is None else plan.bound(kv)
        if embeddings is not None:
            for run, layer in zip(runs, plan.layers, strict=True):
                run.embedding = embeddings[layer].data_ptr()
        streams = {layer: torch.empty(x.shape) for layer in layers if layer in taps}
        for first, layer in zip(plan.firsts, layers, strict=True):
            if layer in streams:
                runs[first].tap = streams[layer].data_ptr()
        for begin, end, cut, layer in plan.calls:
            self._run(byref(runs, begin * sizeof(LayerRun)), end - begin, byref(made))
            if cut is not None:
                own = None if embeddings is None else embeddings[layer]
                _compute(cut, rows, {SCRATCH: scratch, STREAM: stream, INPUTS: inputs, EMBEDDING: own})
        return {**streams, self.count: stream}


def _copied(runs: Array[LayerRun]) -> Array[LayerRun]:
    return type(runs).from_buffer_copy(runs)


def _tensor_of(memory: LayerMemory) -> Tensor:
    """A tensor that is of this memory alone."""
    if isinstance(memory, Tensor):
        return memory
    kv, states = parts_of(memory)
    return cast(LayerStates, states).inputs if kv is None else kv


def _place(memory: LayerMemory) -> _Place:
    if isinstance(memory, Tensor):
        return memory.data_ptr(), memory.dtype, ()
    kv, states = parts_of(memory)
    fields = () if states is None else places_of(states)
    return (None, None, fields) if kv is None else (kv.data_ptr(), kv.dtype, fields)


def _program(block: DecoderBlock, inputs: torch.dtype | None, adapt: Callable[[Any], Any]) -> NativeProgram:
    """The program of a block; `inputs`: the element type of the rows of its own that attention reads."""
    own = None if inputs is None or block.in_features is None else (block.in_features, inputs)

    def compute(ops: Any, x: Any, at: Any) -> Any:
        return block.compute(adapt(ops), x, at)

    return NativeProgram(record(compute, block.width, block.rope_number, own, block.embedding_size))


def _compute(cut: Operation, rows: int, bases: Mapping[int, Tensor | None]) -> None:
    """Compute an operation by stock operations."""
    *inputs, out = (_tensor(value, rows, bases) for value in cut.operands if value is not None)
    assert cut.function is not None
    out.copy_(cut.function(*inputs))


def _tensor(value: Value, rows: int, bases: Mapping[int, Tensor | None]) -> Tensor:
    """The tensor that a value stands for, in the memory of a pass."""
    buffer, base = value.buffer, bases[value.buffer.where]
    assert base is not None
    if buffer.where == SCRATCH:
        base = base[rows * buffer.place : rows * (buffer.place + buffer.size)]
    by_head = (value.head,) if len(value.sizes) == 2 else ()
    flat, strides = base.view(value.dtype), (value.row, *by_head, 1)
    return flat.as_strided((rows, *value.sizes), strides, flat.storage_offset() + value.begin)
