"""Sizes that a model can be grown to, by name or by number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from soothsay.errors import ModelError
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
    intermediate: int  # of one expert, if there are any
    experts: int = 0  # of each layer; 0: it is dense
    chosen: int = 0  # experts of a row

    @classmethod
    def of(cls, config: ModelSpec) -> GrownShape:
        """The shape of a model."""
        attention, dense = config.first(AttentionSpec), [*config.parts(DenseSpec).values()]
        size = dense[0].size if dense else config.first(ExpertsSpec).expert.size
        return cls(config.num_layers, config.hidden_size, attention.heads, attention.kv_heads, size)

    @classmethod
    def parse(cls, text: str, config: ModelSpec) -> GrownShape:
        """Parse a named shape or sizes, `"layers=22,hidden=2048,ffn=5632"`, for the model of `config`.

        A named shape gets the size of the model's heads, and at least its layers. Sizes that are not given
        stay.

        Raises `ModelError` for an unknown name, and for a value that is not a number above 0.
        """
        if text in SHAPES:
            return SHAPES[text].with_head_dim(config.first(AttentionSpec).size).with_layers(config.num_layers)
        names = {field.name: field.name for field in fields(cls)} | {"ffn": "intermediate"}
        example = "layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632,experts=8,chosen=2"
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
