"""Linear layers with the native product for a few rows, and mixtures of experts in one call."""

from __future__ import annotations

from ctypes import Array, Structure, addressof, c_float, c_int, c_void_p
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.mapped_memory import LargePages
from soothsay.model.decoder.feed_forward import DensePart, Experts
from soothsay.model.specs.feed_forward_spec import RoutingSpec
from soothsay.model.weights.quantized import Integers, Mixed, Quantized, QuantizedRows, slabs

PANEL = 64
"""Number of outputs whose weights are stored together."""

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 2: (2,)}
"""Bits of an integer -> how many bits of it stand together, the lower bits first."""


class Multiplier(Protocol):
    """A library that multiplies packed weights: `soothsay.model.native.native_kernels.NativeKernels`."""

    name: str
    memory: LargePages
    """Where packed weights are."""
    multiplies_bfloat16: bool
    """Whether it has instructions for that."""

    def multiply(self, x: Tensor, weights: int, out: Tensor) -> None:
        """`x` `[M, in]` times the weights of a `NativeLinear`, at this address, into `out` `[M, out]`."""

    def pack(self, integers: Tensor, bits: int, out: Tensor) -> None:
        """Pack `integers` `[rows, in]` uint8 into `out` `[panels, steps, PANEL, 4]`. See `PackedWeight`."""

    def read_rows(self, rows: Tensor, weights: int, out: Tensor) -> None:
        """Read `rows` `[n]` of the weights of a `NativeLinear`, at this address, into `out` `[n, in]`."""


class _Factors(Structure):
    """`soothsay_factors` of csrc/kernels.h."""

    _fields_ = [("values", c_void_p), ("units", c_void_p), ("are_half", c_int), ("span", c_int)]


class _Weights(Structure):
    """`soothsay_weights` of csrc/kernels.h."""

    _fields_ = [
        ("data", c_void_p),
        *((name, _Factors) for name in ("scales", "minimums")),
        *((name, c_void_p) for name in ("zeros", "table", "bias", "next")),
        *((name, c_int) for name in ("bits", "inputs", "outputs", "group", "numbers")),
    ]


INTEGERS, PAIRS, FLOATS, HALVES, BFLOATS = range(5)
"""What weights are; see `soothsay_numbers` of csrc/kernels.h."""

_KEPT = {BFLOATS: torch.bfloat16, HALVES: torch.float16, FLOATS: torch.float32}
"""Element types in which numbers are kept, the smallest first."""


class NativeLinear(nn.Module):
    """Plain weights, or integer weights times activations quantized to 8 bits for each row and group.

    Weights are read once for all rows. A row's bits depend on the row alone, not on other rows or the number
    of threads: each output is summed over its inputs in order, and integer sums are exact.

    Args:
        kernels: multiply.
        weight: `[out, in]` floats, or integers.
        bias: `[out]`.
        dtype: of the output, float32 or bfloat16.
    """

    def __init__(
        self, kernels: Multiplier, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype
    ):
        super().__init__()
        self.kernels, self.dtype, self.name = kernels, dtype, kernels.name
        self.out_features, self.in_features = weight.shape
        self.bias = bias = None if bias is None else bias.float().contiguous()
        parts = weight.with_biases(bias) if isinstance(weight, Mixed) else [(weight, bias)]
        self.parts = [PackedWeight(kernels, part, own) for part, own in parts]
        for part, after in zip(self.parts, self.parts[1:], strict=False):
            part.struct.next = after.address
        self.address = self.parts[0].address

    @staticmethod
    def fit(weight: Tensor | Integers) -> bool:
        """Whether the library multiplies this weight."""
        if isinstance(weight, Mixed):
            return all(map(NativeLinear.fit, weight.parts))
        if isinstance(weight, Tensor):
            return weight.dtype in _KEPT.values() and weight.shape[1] % 16 == 0
        return _fits(weight.rows(0, 1))

    @property
    def table(self) -> PackedTable | None:
        """The weight's rows, read one by one, if they are integers: embeddings that are the head as well."""
        return PackedTable(self) if all(part.scales is not None for part in self.parts) else None

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=self.dtype)
        self.kernels.multiply(x, self.address, out)
        return out


class PackedTable:
    """The rows of a layer's integers, read one by one: a table of embeddings that is the output head as well.

    See `soothsay.model.transformer.Table`.
    """

    def __init__(self, layer: NativeLinear):
        self.layer = layer

    @property
    def shape(self) -> torch.Size:
        """`[rows, size]`."""
        return torch.Size([self.layer.out_features, self.layer.in_features])

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32: `[n]` int64, their numbers, to `[n, size]`. A row that is missing is NaN."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), self.layer.in_features)
        self.layer.kernels.read_rows(rows, self.layer.address, out)
        return out


class PackedWeight:
    """A weight in the order in which products read it, `[panels, steps, PANEL, 4]` uint8, and its factors.

    It is packed slab by slab, so that it needs no second copy of the weight. `bias` is float32.
    """

    def __init__(self, kernels: Multiplier, weight: Tensor | QuantizedRows, bias: Tensor | None):
        out, size = weight.shape
        if isinstance(weight, Tensor):
            in_pairs = kernels.multiplies_bfloat16 and weight.dtype == torch.bfloat16
            numbers = PAIRS if in_pairs else _kept(weight)
            bits = 8 * _KEPT.get(numbers, torch.bfloat16).itemsize
        else:
            numbers, bits = INTEGERS, weight.rows(0, 1).bits
        shape = -(-out // PANEL), size * bits // 32, PANEL, 4
        data, kept = kernels.memory.zeros(shape, torch.uint8), []
        for begin, end in slabs(weight, PANEL):
            if isinstance(weight, Tensor):
                for first in range(begin, end, PANEL):
                    _lay_out(weight[first : min(first + PANEL, end)], numbers, data[first // PANEL])
            else:
                rows = weight.rows(begin, end).in_small_groups()
                kernels.pack(rows.values.contiguous(), bits, data[begin // PANEL :])
                kept.append(rows.without_values())
        self.data, self.bias = data, bias
        self.scales = self.minimums = self.scale_units = self.minimum_units = self.zeros = self.table = None
        group = size
        if kept:
            whole = Quantized.cat(kept).with_units_in_half()
            group = size // whole.scales.shape[1]

            def packed(values: Tensor | None) -> Tensor | None:
                return None if values is None else kernels.memory.copy(panels(values))

            self.scales, self.minimums = packed(_narrow(whole.scales)), packed(_narrow(whole.minimums))
            self.scale_units, self.minimum_units = (
                packed(None if unit is None else unit.half()) for unit in (whole.units, whole.minimum_units)
            )
            self.zeros = packed(whole.zeros)
            self.table = None if whole.table is None else (whole.table.round().short() + 128).to(torch.uint8)
        self.struct = _Weights(
            self.data.data_ptr(),
            _pointers(self.scales, self.scale_units),
            _pointers(self.minimums, self.minimum_units),
            *(address(self.zeros), address(self.table), address(self.bias), None),
            *(bits, size, out, group, numbers),
        )

    @property
    def address(self) -> int:
        """Where the library finds it."""
        return addressof(self.struct)


def _lay_out(rows: Tensor, numbers: int, panel: Tensor) -> None:
    """Write rows of floats to a panel `[steps, PANEL, 4]` uint8, as `numbers`."""
    if numbers == PAIRS:
        panel[:, : len(rows)] = rows.contiguous().view(torch.uint8).view(len(rows), -1, 4).transpose(0, 1)
    else:
        panel.view(_KEPT[numbers]).view(-1, PANEL)[:, : len(rows)] = rows.t()


def _kept(weight: Tensor) -> int:
    """How a weight is kept: in the fewest bits that have its numbers as they are."""
    parts = [weight[begin:end] for begin, end in slabs(weight, PANEL)]
    exact = (kind for kind, dtype in _KEPT.items() if all(_has(dtype, part) for part in parts))
    return next(exact, FLOATS)


def _has(dtype: torch.dtype, values: Tensor) -> bool:
    """Whether an element type has numbers as they are. Those that are not finite never are."""
    same = torch.equal(values.to(dtype).to(values.dtype), values)
    return same and bool(values.abs().amax() <= torch.finfo(dtype).max)


def _narrow(values: Tensor | None) -> Tensor | None:
    """Numbers of groups, in half precision if that is exact, as in most formats: fewer bytes to read."""
    if values is None or values.dtype == torch.int8:
        return values
    return values.half() if _has(torch.half, values) else values


def _pointers(values: Tensor | None, units: Tensor | None) -> _Factors:
    if values is None:
        return _Factors(None, None, False, 1)
    span = 1 if units is None else values.shape[1] // units.shape[1]
    return _Factors(values.data_ptr(), address(units), values.dtype == torch.float16, span)


class Addressed(Protocol):
    """What has a place of its own in memory."""

    @property
    def address(self) -> int:
        """Where the library finds it."""


Held = Tensor | Structure | Array[Any] | Addressed | None
"""What an operation holds, which has to outlive it: weights, or how it computes."""


def address(held: Held) -> int | None:
    """Where the library finds something: a tensor's first element, or a structure. None: there is nothing."""
    match held:
        case None:
            return None
        case Tensor():
            return held.data_ptr()
        case Structure() | Array():
            return addressof(held)
        case _:
            return held.address


def panels(values: Tensor) -> Tensor:
    """`[out, n] -> [panels, n, PANEL]`, padded with zeros."""
    values = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def _fits(weight: Quantized) -> bool:
    group = weight.in_small_groups().group_size
    return group % 16 == 0 and group % (32 // PLANES[weight.bits][-1]) == 0


_ORDER = "silu gelu_tanh gelu clipped_swiglu gated_relu2 relu2 relu plain_gelu_tanh plain_gelu plain_silu"
ACTIVATIONS = {name: number for number, name in enumerate(_ORDER.split())}
"""As `Activation` of csrc/activations.h counts them."""


class Routing(Structure):
    """`soothsay_routing` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("correction", "scales")),
        *((name, c_int) for name in ("count", "each", "sigmoid", "normalize", "groups", "kept", "best")),
        *((name, c_float) for name in ("scale", "within")),
        ("scales_inputs", c_int),
    ]

    @classmethod
    def of(cls, c: RoutingSpec, correction: Tensor | None, scales: Tensor | None) -> Routing:
        """How `c` chooses experts. `correction` and `scales` `[experts]` float32 have to outlive it."""
        return cls(
            *(address(correction), address(scales), c.count, c.chosen, c.sigmoid, c.normalize),
            *(c.groups, c.groups_chosen, c.group_best, c.scale),
            *(-1.0 if c.within is None else c.within, c.scales_inputs),
        )


class _Expert(Structure):
    """`soothsay_expert` of csrc/kernels.h."""

    _fields_ = [("gate_up", c_void_p), ("down", c_void_p)]


class _Mixture(Structure):
    """`soothsay_mixture` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("router", "experts", "shared")),
        ("routing", Routing),
        *((name, c_int) for name in ("activation", "is_bf16")),
        ("ran", c_void_p),
    ]


class Mixture:
    """The experts of a layer as the library reads them, at an `address`. They pass `fit`."""

    def __init__(self, experts: Experts):
        parts = [cast(DensePart, part) for part in experts.experts]
        layers = [native_layers(part) for part in parts]
        shared = native_layers(cast(DensePart, experts.shared)) if experts.mixes_shared else None
        vectors = [None if v is None else v.value for v in (experts.correction, experts.scales)]
        router = experts.router if isinstance(experts.router, NativeLinear) else None
        each = (_Expert * len(layers))(*(_Expert(*map(address, pair)) for pair in layers))
        beside = None if shared is None else _Expert(*map(address, shared))
        self._struct = _Mixture(
            *map(address, (router, each, beside)),
            Routing.of(experts.spec.routing, *vectors),
            *(ACTIVATIONS[parts[0].activation], layers[0][1].dtype == torch.bfloat16),
            experts.ran.data_ptr(),
        )
        # keeps alive what the library reads
        self._held = layers, shared, vectors, router, each, beside, experts.ran
        self.address = addressof(self._struct)

    @staticmethod
    def fit(experts: Experts) -> bool:
        """Whether the library computes all of it, but perhaps for the router's scores."""
        if not isinstance(experts.experts[0], DensePart):
            return False
        parts = [cast(DensePart, part) for part in experts.experts]
        shared = [] if experts.shared is None else [experts.shared]
        layers = [layer for part in (*parts, *shared) for layer in (part.first, part.down)]
        router = [experts.router] if isinstance(experts.router, NativeLinear) else []
        dtype = layers[0].dtype
        return all(isinstance(layer, NativeLinear) and layer.dtype == dtype for layer in layers + router)


def native_layers(part: DensePart) -> tuple[NativeLinear, NativeLinear]:
    """The two layers of a part whose layers are the library's."""
    return cast(NativeLinear, part.first), cast(NativeLinear, part.down)
