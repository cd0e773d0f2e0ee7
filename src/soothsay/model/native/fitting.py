"""Which models the native kernels can compute."""

from __future__ import annotations

from soothsay.model.native.experts import ACTIVATIONS
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec, Part
from soothsay.model.specs.state_specs import ConvolutionSpec, DeltaSpec, StateSpaceSpec

LANES = 16
"""Sizes of rows must be multiples of this, and head dimensions multiples of twice this."""

MAX_ROW = 1024
"""Limit of a head's dimensions in the KV pool."""


def fits(spec: ModelSpec) -> bool:
    """Whether the kernels can compute a model of these sizes."""
    if spec.source is not None:
        return False
    sizes = [spec.hidden_size]
    for layer in spec.layers:
        sizes += [] if layer.input is None else [layer.input.size]
        sizes += [] if layer.alternating is None else [layer.alternating.laurel_rank]
        for part in layer.parts:
            if not (own := _sizes(part)):
                return False
            sizes += own
    return not any(size % LANES for size in sizes)


def _sizes(part: Part) -> list[int]:
    """The sizes of a part that must be multiples of `LANES`. Empty: the kernels cannot compute it."""
    match part:
        case AttentionSpec():
            return [part.size // 2] if part.size <= MAX_ROW else []
        case LatentSpec():
            row = part.rank + part.rotated
            return [row // 2, part.rank, part.query_rank or 0, part.rotated // 2] if row <= MAX_ROW else []
        case DeltaSpec():
            return [part.key_size, part.value_size]
        case ConvolutionSpec():
            return [part.channels]
        case StateSpaceSpec():
            return [part.head_size, part.state_size]
        case DenseSpec():
            return [part.size] if part.activation in ACTIVATIONS else []
        case ExpertsSpec():
            shared = [] if part.shared is None else _sizes(part.shared)
            return [*_sizes(part.expert), *shared, part.latent_size or 0] if _sizes(part.expert) else []
