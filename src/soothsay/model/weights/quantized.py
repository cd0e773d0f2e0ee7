"""Weights as small integers with scales, the form that formats are read into and kernels pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from soothsay.model.loaded_part import Table

SLAB = 2**20
"""Number of weights that are read or rounded at a time, to save memory."""

MAX_GROUP = 64
"""Limit of inputs that share a scale in a product: activations are rounded to 8 bits in the same groups."""

OF_ROWS = ("values", "scales", "zeros", "minimums", "units", "minimum_units")
"""The parts of a `Quantized` that have a row for each of its rows."""

Kind = tuple[object, ...]


class QuantizedRows(Protocol):
    """A weight `[out, in]` in integers, of which rows are had when they are needed."""

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""

    @property
    def kind(self) -> Kind:
        """Bits, groups and so on: what weights have in common that can be one."""
        return self.rows(0, 1).kind

    def rows(self, begin: int, end: int) -> Quantized:
        """The rows from `begin` to `end`."""


@runtime_checkable
class QuantizedTable(Table, QuantizedRows, Protocol):
    """A table in integers, of which rows are had as they are stored, or as floats."""

    data: Any  # the integers as they are stored, an array or a tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight `[out, in]` in integers, as one of its rows is quantized in groups of inputs.

    `weight[o, i] = scale[o, g] * (integer[o, i] - zero[o, g]) + minimum[o, g]`. Groups are runs of
    `group_size` inputs; a single group is a scale per output channel.
    """

    bits: int  # 2, 4, 5, 6 or 8
    values: Tensor  # [out, in] uint8, below 2 ** bits
    scales: Tensor  # [out, groups] float32, or int8 if there are units
    zeros: Tensor | None = None  # [out, groups] uint8; None: 0 with minimums, else 2 ** (bits - 1) everywhere
    minimums: Tensor | None = None  # as the scales; None: there are none
    units: Tensor | None = None  # [out, blocks] float32: factors of scales
    minimum_units: Tensor | None = None  # [out, blocks] float32: factors of minimums
    table: Tensor | None = None
    """`[16]`: what the values stand for, integers from -128 to 127, without zeros. Products round floats."""

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.values.shape

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def kind(self) -> Kind:
        """See `QuantizedRows`."""
        table = None if self.table is None else tuple(self.table.tolist())
        parts = self.zeros is None, self.minimums is None, self.units is not None and self.units.shape[1]
        return self.bits, self.group_size, *parts, table

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        return self.each(lambda part: part[begin:end])

    def take(self, rows: Tensor) -> Quantized:
        """Some rows: `[n]` int64, their numbers."""
        return self.each(lambda part: part[rows])

    def each(self, change: Callable[[Tensor], Tensor], names: Sequence[str] = OF_ROWS) -> Quantized:
        """The same with other parts, of those that there are."""
        held = ((name, getattr(self, name)) for name in names)
        made: dict[str, Any] = {name: change(part) for name, part in held if part is not None}
        return replace(self, **made)

    def without_values(self) -> Quantized:
        """The factors alone."""
        return replace(self, values=self.values[:, :0])

    def integers(self) -> Tensor:
        """Integers between -128 and 255, without their zeros: `[out, in]` int16."""
        if self.table is not None:
            return self.table.round().short()[self.values.int()]
        zero = 0 if self.minimums is not None else 2 ** (self.bits - 1)
        if self.zeros is None:
            return self.values.short() - zero
        out, groups = self.scales.shape
        return (self.values.view(out, groups, -1).short() - self.zeros.short()[..., None]).view(self.shape)

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minimums, `[out, groups]` float32."""
        minimums = None if self.minimums is None else _times(self.minimums, self.minimum_units)
        return _times(self.scales, self.units), minimums

    def dequantize(self) -> Tensor:
        """The weight in float32."""
        scales, minimums = self.factors()
        exact = self.integers().float() if self.table is None else self.table.float()[self.values.int()]
        weight = exact.view(*scales.shape, -1) * scales[..., None]
        return (weight if minimums is None else weight + minimums[..., None]).view(self.shape)

    def with_units_in_half(self) -> Quantized:
        """The same weight, with units that are the same in half precision, or with scales that hold them."""
        units = [unit for unit in (self.units, self.minimum_units) if unit is not None]
        if all(torch.equal(unit.half().float(), unit) for unit in units):
            return self
        scales, minimums = self.factors()
        return replace(self, scales=scales, minimums=minimums, units=None, minimum_units=None)

    def in_small_groups(self) -> Quantized:
        """The same weight in groups of at most `MAX_GROUP` inputs, if its inputs can be divided so.

        In a product, the largest activation of a group decides how finely the others are rounded.
        """
        size = next((n for n in (MAX_GROUP, 32, 16) if self.group_size % n == 0), self.group_size)
        times = self.group_size // size
        if times == 1:
            return self
        return self.each(lambda part: part.repeat_interleave(times, 1), ("scales", "zeros", "minimums"))

    @staticmethod
    def cat(parts: Sequence[Quantized]) -> Quantized:
        """Weights joined along their rows. Raises `ValueError` if they are of different kinds."""
        if len({part.kind for part in parts}) != 1:
            kinds = sorted(f"{part.bits} bits in groups of {part.group_size}" for part in parts)
            raise ValueError(f"weights that are quantized differently cannot be joined: {kinds}")
        held = [name for name in OF_ROWS if getattr(parts[0], name) is not None]
        made: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in held}
        return replace(parts[0], **made)


@dataclass(frozen=True, slots=True)
class Joined(QuantizedRows):
    """Weights of one kind, one below the other."""

    parts: tuple[QuantizedRows, ...]

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size([sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]])

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        cut, first = [], 0
        for part in self.parts:
            rows = part.shape[0]
            if begin < first + rows and first < end:
                cut.append(part.rows(max(begin - first, 0), min(end - first, rows)))
            first += rows
        return Quantized.cat(cut)


@dataclass(frozen=True, slots=True)
class Reordered(QuantizedRows):
    """Some or all rows of a weight, in another order. See `QuantizedRows`."""

    weight: QuantizedRows
    order: Tensor  # [out] int64: for each row, its number in `weight`; close rows have close numbers

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size([len(self.order), self.weight.shape[1]])

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        wanted = self.order[begin:end]
        first, last = int(wanted.min()), int(wanted.max())
        return self.weight.rows(first, last + 1).take(wanted - first)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Weights of different kinds, one below the other: integers, and plain ones."""

    parts: tuple[QuantizedRows | Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size([sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]])

    def with_biases(self, bias: Tensor | None) -> list[tuple[QuantizedRows | Tensor, Tensor | None]]:
        """The parts, each with its part of a bias `[out]`."""
        made: list[tuple[QuantizedRows | Tensor, Tensor | None]] = []
        first = 0
        for part in self.parts:
            made.append((part, None if bias is None else bias[first : first + part.shape[0]]))
            first += part.shape[0]
        return made


Integers = QuantizedRows | Mixed
"""A weight in integers, or in parts of which some are."""


@dataclass(frozen=True, slots=True)
class Coarser(QuantizedRows):
    """A weight in integers, rounded again to fewer bits. See `QuantizedRows`."""

    weight: QuantizedRows
    bits: int
    group_size: int | None  # inputs that share a scale; None: all

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.weight.shape

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        return round_to_nearest(self.weight.rows(begin, end).dequantize(), self.bits, self.group_size)


def joined(parts: Sequence[QuantizedRows | Tensor]) -> Tensor | Integers:
    """Weights one below the other, in order. Plain ones have one dtype."""
    kinds = groupby(parts, lambda part: "plain" if isinstance(part, Tensor) else part.kind)
    made = tuple(_of_one_kind([*run]) for _, run in kinds)
    return made[0] if len(made) == 1 else Mixed(made)


def _of_one_kind(parts: Sequence[QuantizedRows | Tensor]) -> QuantizedRows | Tensor:
    if len(parts) == 1:
        return parts[0]
    integers = tuple(part for part in parts if not isinstance(part, Tensor))
    return Joined(integers) if integers else torch.cat([part for part in parts if isinstance(part, Tensor)])


def coarser(weight: QuantizedRows, bits: int, group_size: int | None) -> QuantizedRows:
    """A weight that is rounded again, in groups of inputs, if it has more than `bits`. None: all in one."""
    return Coarser(weight, bits, group_size) if weight.rows(0, 1).bits > bits else weight


def table_of(*integers: int) -> Tensor:
    """A table of a `Quantized`, also while another device is the usual one."""
    return torch.tensor(integers, dtype=torch.int8, device="cpu")


def _times(factors: Tensor, units: Tensor | None) -> Tensor:
    if units is None:
        return factors
    return (factors.float().view(*units.shape, -1) * units[..., None]).view(factors.shape)


def slabs(weight: Tensor | QuantizedRows, multiple: int = 1) -> list[tuple[int, int]]:
    """Where to cut a weight so that a part has about `SLAB` weights, in multiples of some rows."""
    out, size = weight.shape
    each = max(SLAB // size // multiple, 1) * multiple
    return [(begin, min(begin + each, out)) for begin in range(0, out, each)]


def dequantized(weight: Tensor | Integers, dtype: torch.dtype) -> Tensor:
    """The whole weight in a float dtype."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Mixed):
        return torch.cat([dequantized(part, dtype) for part in weight.parts])
    out = torch.empty(weight.shape, dtype=dtype)
    for begin, end in slabs(weight):
        out[begin:end] = weight.rows(begin, end).dequantize()
    return out


def round_to_nearest(weight: Tensor, bits: int, group_size: int | None = None) -> Quantized:
    """The nearest symmetric integers for a weight `[out, in]`.

    The largest value of a group maps to the end of the range, up to the scale's rounding to bfloat16. Without
    `group_size`, a row is a group.

    Raises `ValueError` if `in` is not a multiple of `group_size`.
    """
    size = weight.shape[1]
    group_size = group_size or size
    if size % group_size:
        raise ValueError(f"{size} inputs cannot be divided into groups of {group_size}")
    end, slab = 2 ** (bits - 1) - 1, max(SLAB // size, 1)
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), size // group_size, device=weight.device)
    for begin in range(0, len(weight), slab):
        rows = slice(begin, begin + slab)
        groups = weight[rows].float().view(-1, size // group_size, group_size)
        scales[rows] = (groups.abs().amax(-1) / end).bfloat16().float()
        nearest = (groups / scales[rows].clamp_min(1e-30)[..., None]).round_().clamp_(-end, end) + (end + 1)
        values[rows] = nearest.flatten(1).to(torch.uint8)
    return Quantized(bits, values, scales)
