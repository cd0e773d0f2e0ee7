"""What each tensor of a grown model is made of: where the small one's values go, and what is new."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.weight_format import Reader


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a tensor. Index `places[i]` of the new tensor is index `taken[i]` of the old one."""

    old: int
    new: int
    places: Tensor  # [n] int64
    taken: Tensor  # [n] int64

    @classmethod
    def first(cls, old: int, new: int) -> Axis:
        """An axis where the old indices come first, in order."""
        return cls(old, new, torch.arange(old), torch.arange(old))

    @classmethod
    def heads(cls, old: int, new: int, head_dim: int, continued: Mapping[int, int]) -> Axis:
        """An axis of heads of size `head_dim`. `continued` maps new heads to old ones."""
        within = torch.arange(head_dim)
        places = torch.tensor(list(continued))[:, None] * head_dim + within
        taken = torch.tensor(list(continued.values()))[:, None] * head_dim + within
        return cls(old * head_dim, new * head_dim, places.flatten(), taken.flatten())

    def emptied(self) -> Axis:
        """The same axis without old indices."""
        return replace(self, places=self.places[:0], taken=self.taken[:0])


@dataclass(frozen=True, slots=True)
class Rule:
    """How a tensor grows."""

    axes: tuple[Axis, ...]  # out, in
    factor: float = 1.0  # for old values
    fill: float | None = None  # the new values; None: noise
    centre: float | None = None  # for norms: the stored weight is the weight minus this

    def bias(self) -> Rule:
        """The rule of a bias, from the rule of its weight."""
        return replace(self, axes=self.axes[:1])

    def emptied(self) -> Rule:
        """The same rule without old values."""
        return replace(self, axes=tuple(axis.emptied() for axis in self.axes))


@dataclass(frozen=True, slots=True)
class GrownTensor:
    """Description of a tensor of the grown model, which `make` makes."""

    name: str
    source: str  # its name in the checkpoint
    rule: Rule
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the grown model."""
        return tuple(axis.new for axis in self.rule.axes)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, read: Reader) -> Tensor:
        """Make the tensor. Raises `ModelError` if the old tensor does not have the configuration's shape."""
        old, rule = read(self.source), self.rule
        expected = [axis.old for axis in rule.axes]
        if list(old.shape) != expected:
            raise ModelError(f"{self.source} is {list(old.shape)}; by config.json it should be {expected}")
        new = self._noise(old) if rule.fill is None else torch.full(self.shape, rule.fill, dtype=self.dtype)
        for dimension, axis in enumerate(rule.axes):
            old = old.index_select(dimension, axis.taken)
        if rule.centre is not None:
            old = (old.float() + rule.centre) * rule.factor - rule.centre
        elif rule.factor != 1.0:
            old = old * _without_rounding(rule.factor, self.dtype)
        rows, *columns = (axis.places for axis in rule.axes)
        new[(rows[:, None], *columns) if columns else rows] = old
        return new

    def _noise(self, old: Tensor) -> Tensor:
        # Three digits, because the last digits may depend on the number of threads.
        scale = float(f"{float(old.std()):.3g}")
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return torch.empty(self.shape, dtype=self.dtype).normal_(std=scale, generator=generator)


def _without_rounding(factor: float, dtype: torch.dtype) -> float:
    """The factor to use before a norm in this dtype; see the top of `grow.py`."""
    return factor if dtype.itemsize > 2 else 2.0 ** round(math.log2(factor))
