"""Operations as the library reads them, and the passes that they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.model.native.layout import path_pointers, strand_plan
from soothsay.model.native.native_linear import Held, address
from soothsay.model.ops.operands import Ropes, Rotation

KV_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2, torch.int8: 3}
"""Element type of a KV pool -> `soothsay_format` of csrc/kernels.h."""


KINDS = (
    *(
        "linear",
        "linear_heads",
        "add_norm",
        "centred_norm",
        "rotate_store",
        "attend",
        "sigmoid_gate",
        "delta",
    ),
    *("state_space", "convolve", "gated", "mix", "copy", "scale", "blend", "add_gated", "grow", "rotate"),
    *("store", "adapt", "convolved", "scan"),
)
"""The operations, as `soothsay_kind` of csrc/kernels.h counts them."""
_NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}

NOWHERE, ADDRESS, SCRATCH, STREAM, INPUTS, EMBEDDING = range(6)
"""The base of an operand; see `soothsay_where` of csrc/kernels.h."""


class Operand(Structure):
    """`soothsay_operand` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_int64) for name in ("place", "begin", "row", "head")),
        *((name, c_int) for name in ("where", "is_bf16", "heads", "size")),
    ]

    @classmethod
    def of(cls, x: Any) -> Operand:
        """A tensor `[N, size]` or `[N, heads, size]`, which has to outlive it; or what stands for one."""
        if x is None:
            return cls()
        if not isinstance(x, Tensor):
            return x.operand()  # type: ignore[no-any-return]
        strides, shape, is_bf16 = x.stride(), x.shape, x.dtype is torch.bfloat16
        head, heads = (strides[1], shape[1]) if len(shape) == 3 else (0, 1)
        return cls(x.data_ptr(), 0, strides[0], head, ADDRESS, is_bf16, heads, shape[-1])


class Op(Structure):
    """`soothsay_op` of csrc/kernels.h."""

    _fields_ = [
        ("kind", c_int),
        ("numbers", c_int * 7),
        ("factors", c_float * 2),
        ("held", c_void_p * 4),
        ("operands", Operand * 4),
    ]


class Operation(NamedTuple):
    """An operation of tensors, or of values that stand for them."""

    kind: str
    operands: Sequence[Any]
    held: Sequence[Held] = ()
    numbers: Sequence[int] = ()
    factors: Sequence[float] = ()
    function: Callable[..., Tensor] | None = None
    """It is computed in Python, and cuts the program."""

    def as_op(self) -> Op:
        """As the library reads it. What it holds has to outlive that."""
        operands, held = map(Operand.of, self.operands), map(address, self.held)
        return Op(_NUMBER_OF[self.kind], (*self.numbers,), (*self.factors,), (*held,), (*operands,))


class Sight(Structure):
    """`soothsay_sight` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "key_begin", "rows", "positions", "row_begin", "shared")),
        ("count", c_int64),
    ]


class Pass(Structure):
    """`soothsay_pass` of csrc/kernels.h."""

    _fields_ = [
        ("rows", c_int64),
        *((name, c_void_p) for name in ("positions", "slots")),
        ("sights", Sight * 2),
        *((name, c_void_p) for name in ("plan", "adapters", "ropes")),
        ("pool_slots", c_int64),
        *((name, c_void_p) for name in ("stream", "inputs", "scratch")),
        ("stream_size", c_int),
    ]

    def read_ropes(self, ropes: Ropes) -> None:
        """Let heads rotate by `ropes`, which have to outlive this."""
        parts = [part.data_ptr() for rope in ropes for part in rope]
        self._ropes = (c_void_p * len(parts))(*parts)  # alive as long as this
        self.ropes = addressof(self._ropes)

    def read_paths(self, batch: Batch) -> None:
        """Let rows attend as `batch` says, which has to outlive this."""
        self.sights[0] = path_pointers(batch)
        if batch.across is not None:
            self.sights[1] = path_pointers(batch.across)


class LayerRun(Structure):
    """`soothsay_layer` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("ops", "kv", "states", "embedding", "tap")),
        *((name, c_int) for name in ("count", "format")),
    ]


class Reads(NamedTuple):
    """What an operation reads of a pass beside its operands."""

    rope: Rotation | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    kv: Tensor | None = None
    batch: Batch | None = None
    states: LayerStates | None = None
    strands: Strands | None = None
    adapters: Tensor | None = None

    def as_pass(self, rows: int) -> Pass:
        """The pass of one operation over some rows."""
        made = Pass(rows, address(self.positions), address(self.slots))
        if self.rope is not None:
            made.read_ropes((self.rope,))
        if self.kv is not None:
            made.pool_slots = self.kv.shape[1]
        if self.batch is not None:
            made.read_paths(self.batch)
        if self.strands is not None:
            made.plan = strand_plan(self.strands)
        made.adapters = address(self.adapters)
        return made
