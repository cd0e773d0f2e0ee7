"""The operations of decoder layers, as the library computes them: at once, or recorded for later.

Layers with a state are here too: convolutions, the gated delta rule, Mamba and Mamba-2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import Array, Structure, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.functions import UNGATED
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.model.native.native_linear import ACTIVATIONS, address
from soothsay.model.native.program import Operation, Reads
from soothsay.model.ops.operands import PLAIN, HeadForm, Norm, Rotation, Scoring
from soothsay.model.ops.state_ops import Recurrence, SelectiveScan, StateSpace, TokenRule


class Convolution(Structure):
    """`soothsay_convolution` of csrc/kernels.h. The taps `[taps, channels]` of a layer are float32."""

    _fields_ = [("taps", c_void_p), *((name, c_int) for name in ("taps_count", "channels"))]


class States(Structure):
    """`soothsay_states` of csrc/kernels.h. For the fields see `places_of`."""

    _fields_ = [
        *((name, c_void_p) for name in ("matrices", "inputs", "journal", "gates")),
        ("nodes", c_int64),
    ]


def places_of(states: LayerStates) -> tuple[int, ...]:
    """The fields of `States`: the addresses of its parts, and the nodes that the journal has room for."""
    return *(part.data_ptr() for part in states), states.journal.shape[1]


class Delta(Structure):
    """`soothsay_delta` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "log_rates", "offsets", "scale")),
        *((name, c_int) for name in ("key_heads", "value_heads", "key_size", "value_size")),
        *((name, c_int) for name in ("taps_count", "tiled", "decays", "sigmoid")),
        ("eps", c_float),
    ]

    @classmethod
    def of(cls, weights: Recurrence) -> Delta:
        """The weights of a layer, which have to outlive it."""
        c, parts = weights.spec, (weights.taps, weights.log_rates, weights.offsets, weights.scale)
        return cls(
            *(part.data_ptr() for part in parts),
            *(c.key_heads, c.value_heads, c.key_size, c.value_size),
            *(c.taps, c.tiled, c.decays, c.opening == "sigmoid", weights.eps),
        )


class StateSpaceWeights(Structure):
    """`soothsay_state_space` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "bias", "log_rates", "offsets", "skips", "scale")),
        *((name, c_int) for name in ("heads", "groups", "head_size", "state_size", "taps_count")),
        ("norm_first", c_int),
        ("eps", c_float),
    ]

    @classmethod
    def of(cls, weights: StateSpace) -> StateSpaceWeights:
        """The weights of a layer, which have to outlive it."""
        c, scale = weights.spec, weights.scale
        parts = (weights.taps, weights.bias, weights.log_rates, weights.offsets, weights.skips)
        return cls(
            *map(address, (*parts, scale)),
            *(c.heads, c.groups, c.head_size, c.state_size, c.taps, c.norm_first, weights.eps),
        )


class SelectiveWeights(Structure):
    """`soothsay_selective` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "bias", "rates", "offsets", "skips")),
        *((name, c_int) for name in ("heads", "width", "state_size", "taps_count")),
    ]

    @classmethod
    def of(cls, weights: SelectiveScan) -> SelectiveWeights:
        """The weights of a layer, which have to outlive it."""
        c = weights.spec
        parts = (weights.taps, weights.bias, weights.rates, weights.offsets, weights.skips)
        places = (part.data_ptr() for part in parts)
        return cls(*places, c.size // c.width, c.width, c.state_size, c.taps)


def rule_structure(rule: TokenRule) -> tuple[str, Structure]:
    """The operation of a layer's rule, and its weights, which have to outlive the structure."""
    if isinstance(rule, Recurrence):
        return "delta", Delta.of(rule)
    if isinstance(rule, SelectiveScan):
        return "scan", SelectiveWeights.of(rule)
    assert isinstance(rule, StateSpace)
    return "state_space", StateSpaceWeights.of(rule)


STEP = 4
"""Inputs that the library adds products of side by side, in `soothsay_adapt`."""


class LowRank(nn.Module):
    """See `Kernels.low_rank`. It has no `forward`, since the operation `adapt` reads its weights."""

    def __init__(self, down: Tensor, up: Tensor):
        super().__init__()
        self.rank = len(down)
        panels = (one.view(-1, 16, one.shape[1]).transpose(1, 2).contiguous() for one in (down, up))
        self.down, self.up = (nn.Parameter(one, requires_grad=False) for one in panels)
        used = self.up.view(len(self.up), -1, STEP * 16).ne(0).any(2).int()  # that of q, k and v has blocks
        spans = torch.stack([used.argmax(1), used.shape[1] - used.flip(1).argmax(1)], dim=1)
        self.spans = nn.Parameter(STEP * spans.int(), requires_grad=False)


class LowRanks(Structure):
    """`soothsay_low_rank` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("down", "up", "spans")),
        *((name, c_int) for name in ("rank", "are_bf16")),
    ]

    @classmethod
    def of(cls, layers: Sequence[nn.Module | None]) -> Array[LowRanks]:
        """The weights of layers, which have to outlive it; None: of a layer that adds nothing."""
        made = (cls * len(layers))()
        for place, layer in enumerate(layers):
            if isinstance(layer, LowRank):
                parts = map(address, (layer.down, layer.up, layer.spans))
                made[place] = cls(*parts, layer.rank, layer.up.dtype == torch.bfloat16)
        return made


NOTHING = Reads()


class NativeOperations(ABC):
    """Operations that are written once for both ways to run them. For their contracts see `Kernels`.

    `_new` makes what an operation writes, and `_emit` runs the operation or records it. Tensors are those of
    a pass, or stand for them.
    """

    @abstractmethod
    def _new(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        """Room for as many rows as `like` has, of `shape`; without one, of the shape that `like` has."""

    @abstractmethod
    def _emit(self, op: Operation, reads: Reads = NOTHING) -> None:
        """Run or record an operation; see `soothsay_kind` of csrc/kernels.h."""

    @abstractmethod
    def _whole(self, x: Tensor) -> Tensor:
        """`x`, with its rows end to end."""

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        x, out = self._whole(x), self._new(x, dtype)
        if norm.centred:
            self._emit(Operation("centred_norm", (x, out), (norm.weight, norm.bias), factors=(norm.eps,)))
        else:
            self._emit(Operation("add_norm", (x, None, None, out), (None, norm.weight), factors=(norm.eps,)))
        return out

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """See `Kernels`."""
        x, delta = self._whole(x), self._whole(delta)
        total = self._new(x, torch.float32)
        held, eps = (None, 0.0) if post is None else (post.weight, post.eps)
        self._emit(Operation("add_norm", (x, delta, total), (held,), factors=(eps,)))
        return total

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        if norm.centred:
            total = self.add(x, delta, post)
            return total, self.norm(total, norm, dtype)
        x, delta = self._whole(x), self._whole(delta)
        total, out = self._new(x, torch.float32), self._new(x, dtype)
        held = None if post is None else post.weight, norm.weight
        self._emit(Operation("add_norm", (x, delta, total, out), held, factors=(norm.eps,)))
        return total, out

    def rotate_store(self, qkv: Tensor, rope: Rotation, kv: Tensor, slots: Tensor, form: HeadForm) -> Tensor:
        """See `Kernels`."""
        qkv = self._whole(qkv)
        d, (queries, keys) = qkv.shape[2], form.counts(qkv.shape[1], kv)
        q = self._new(qkv, torch.float32, queries, d)
        own = *(form.norms or (None, None)), form.value_norm
        held = *(None if norm is None else norm.weight for norm in own), form.centre
        eps = next((norm.eps for norm in own if norm is not None), 0.0)
        reads = Reads(rope=rope, slots=slots, kv=kv)
        numbers = queries, form.gates, keys, d
        self._emit(Operation("rotate_store", (qkv, q), held, numbers, (eps, form.scale)), reads)
        return q

    def attend(self, q: Tensor, kv: Tensor, batch: Batch, how: Scoring = PLAIN) -> Tensor:
        """See `Kernels`. Keys are read in place."""
        queries, d = q.shape[1:]
        most = 0 if how.relative is None else how.relative.shape[1] // 2
        heads, values = max(1, kv.shape[0] // 2), kv.shape[0] // 2
        out = self._new(q, torch.float32, queries * d)
        numbers = heads, values, queries // heads, d, how.window or 0, most
        reads = Reads(positions=batch.positions, kv=kv, batch=batch)
        op = Operation("attend", (q, out), (how.sinks, how.relative), numbers, (how.softcap or 0.0,))
        self._emit(op, reads)
        return out

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """See `Kernels`."""
        out = self._new(x, torch.float32)
        self._emit(Operation("sigmoid_gate", (x, gates, out)))
        return out

    def token_rule(
        self, rows: Tensor, gates: Tensor, rule: TokenRule, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """See `Kernels`. Without gates of outputs, outputs are of no use, and are not made."""
        rows = self._whole(rows)
        gates = self._whole(self.cast(gates, rows.dtype))
        out = self._new(rows, torch.float32, rule.outputs) if rows.shape[1] > rule.shape.channels else None
        kind, held = rule_structure(rule)
        self._emit(Operation(kind, (rows, gates, out), (held,)), Reads(states=states, strands=strands))
        return torch.empty(0) if out is None else out

    def convolved(
        self, x: Tensor, rule: SelectiveScan, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """See `Kernels`."""
        out, reads = self._new(x, torch.float32), Reads(states=states, strands=strands)
        self._emit(Operation("convolved", (x, out), (SelectiveWeights.of(rule),)), reads)
        return out

    def convolve(self, x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
        """See `Kernels`."""
        return self._convolved(x, taps, Reads(states=states, strands=strands), is_gated=False)

    def gated_convolve(
        self, bcx: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """See `Kernels`. It writes to `bcx`."""
        return self._convolved(bcx, taps, Reads(states=states, strands=strands), is_gated=True)

    def _convolved(self, x: Tensor, taps: Tensor, reads: Reads, *, is_gated: bool) -> Tensor:
        x = self._whole(x)
        out = self._new(x, torch.float32, taps.shape[1])
        held = Convolution(taps.data_ptr(), *taps.shape)
        self._emit(Operation("convolve", (x, out), (held,), (is_gated,)), reads)
        return out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`."""
        gate_up = self._whole(gate_up)
        size = gate_up.shape[1] // (1 if activation in UNGATED else 2)
        out = self._new(gate_up, gate_up.dtype, size)
        self._emit(Operation("gated", (gate_up, out), numbers=(ACTIVATIONS[activation],)))
        return out

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        if x.dtype == dtype:
            return x
        out = self._new(x, dtype)
        self._emit(Operation("copy", (x, out)))
        return out

    def scale(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """See `Kernels`."""
        x, out = self._whole(x), self._new(x, x.dtype)
        if isinstance(factor, Tensor) and factor.numel() > 1:
            self._emit(Operation("scale", (x, out), (factor,)))
        else:
            number = factor.item() if isinstance(factor, Tensor) else factor
            self._emit(Operation("scale", (x, out), factors=(number,)))
        return out

    def blend(self, x: Tensor, a: float, y: Tensor, b: float) -> Tensor:
        """See `Kernels`."""
        out = self._new(x, torch.float32)
        self._emit(Operation("blend", (self._whole(x), self._whole(y), out), factors=(a, b)))
        return out

    def add_gated(self, x: Tensor, gates: Tensor, y: Tensor) -> Tensor:
        """See `Kernels`."""
        out = self._new(x, torch.float32)
        self._emit(Operation("add_gated", (self._whole(x), self._whole(gates), self._whole(y), out)))
        return out

    def grow(self, q: Tensor, factors: Tensor, span: int, shift: int, positions: Tensor) -> Tensor:
        """See `Kernels`."""
        q, out = self._whole(q), self._new(q, torch.float32)
        numbers = span, shift, len(factors) - 1
        self._emit(Operation("grow", (q, out), (factors,), numbers), Reads(positions=positions))
        return out

    def rotate(self, x: Tensor, rope: Rotation) -> Tensor:
        """See `Kernels`."""
        out = self._new(x, torch.float32)
        self._emit(Operation("rotate", (x, out)), Reads(rope=rope))
        return out

    def store(self, rows: Tensor, kv: Tensor, slots: Tensor) -> None:
        """See `Kernels`."""
        self._emit(Operation("store", (self._whole(rows),)), Reads(kv=kv, slots=slots))

    def adapt(
        self, out: Tensor, x: Tensor, adapters: Sequence[nn.Module | None], numbers: Tensor | None
    ) -> Tensor:
        """See `Kernels`. It writes to `out`."""
        op = Operation("adapt", (self._whole(x), out), (LowRanks.of(adapters),))
        self._emit(op, Reads(adapters=numbers))
        return out
