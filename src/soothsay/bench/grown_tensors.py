"""What a grown model is made of: its sizes, where the small one's values go in a tensor, and what is new."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.weight_format import Reader
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GrownShape:
    """The sizes of a decoder that can grow. Its vocabulary and the size of a head cannot."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int

    @classmethod
    def of(cls, config: ModelSpec) -> GrownShape:
        """The shape of a model."""
        attention, size = config.first(AttentionSpec), config.first(DenseSpec).size
        return cls(config.num_layers, config.hidden_size, attention.heads, attention.kv_heads, size)

    @classmethod
    def parse(cls, text: str, config: ModelSpec) -> GrownShape:
        """Parse a named shape or sizes, `"layers=22,hidden=2048,ffn=5632"`, for the model of `config`.

        A named shape gets the size of the model's heads, and at least its layers. Sizes that are not given
        stay.

        Raises `ModelError` for an unknown name, and for a value that is not a number above 0.
        """
        if config.parts(ExpertsSpec):
            raise ModelError(f"a mixture of experts ({config.family}) cannot grow: it is not supported")
        if text in SHAPES:
            return SHAPES[text].with_head_dim(config.first(AttentionSpec).size).with_layers(config.num_layers)
        names = {field.name: field.name for field in fields(cls)} | {"ffn": "intermediate"}
        example = "layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632"
        sizes = read_sizes(text, names, f"{', '.join(SHAPES)} or {example}")
        return replace(cls.of(config), **{names[name]: size for name, size in sizes.items()})

    def with_head_dim(self, head_dim: int) -> GrownShape:
        """Change the size of a head. All heads together stay about as wide, and groups keep their size."""
        group = self.heads // self.kv_heads
        kv_heads = max(1, self.hidden // (head_dim * group))
        return replace(self, heads=kv_heads * group, kv_heads=kv_heads)

    def with_layers(self, least: int) -> GrownShape:
        """A shape of at least `least` layers. More layers have fewer units each, for as many weights."""
        if least <= self.layers:
            return self
        attention = 2 * self.hidden * self.hidden * (self.heads + self.kv_heads) // self.heads
        unit = 3 * self.hidden  # weights of a unit in the feed-forward part
        weights = self.layers * (attention + unit * self.intermediate) // least  # of a block
        units = max((weights - attention) // unit, UNITS)
        return replace(self, layers=least, intermediate=round(units / UNITS) * UNITS)


UNITS = 256
"""Derived sizes of feed-forward parts are multiples of this, as the largest blocks of integers need."""

SHAPES = {
    "0.5B": GrownShape(layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864),  # Qwen2.5 0.5B
    "1B": GrownShape(layers=22, hidden=2048, heads=32, kv_heads=4, intermediate=5632),  # TinyLlama 1.1B
    "3B": GrownShape(layers=28, hidden=3072, heads=24, kv_heads=8, intermediate=8192),  # Llama 3.2 3B
}


def read_sizes(text: str, names: Collection[str], instead: str) -> dict[str, int]:
    """Parse `"layers=22,hidden=2048"` into sizes by name.

    Args:
        text: the user's text.
        names: the known names.
        instead: examples of valid texts, for the error.

    Raises `ModelError` for an unknown name, and for a value that is not a number above 0.
    """
    sizes = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in names or not number.isdecimal() or int(number) < 1:
            raise ModelError(f"shape {text!r}: {part!r} is not understood; write {instead}")
        sizes[name] = int(number)
    return sizes


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
            exact = 2.0 ** round(math.log2(rule.factor))  # instead, before a norm; see the top of `grow.py`
            old = old * (rule.factor if self.dtype.itemsize > 2 else exact)
        rows, *columns = (axis.places for axis in rule.axes)
        new[(rows[:, None], *columns) if columns else rows] = old
        return new

    def _noise(self, old: Tensor) -> Tensor:
        # Three digits, because the last digits may depend on the number of threads.
        scale = float(f"{float(old.std()):.3g}")
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return torch.empty(self.shape, dtype=self.dtype).normal_(std=scale, generator=generator)
