"""Which layers of a model each process gets."""

from __future__ import annotations

from itertools import accumulate, pairwise

from soothsay.errors import ModelError
from soothsay.model.specs.model_spec import ModelSpec


def split_layers(spec: ModelSpec, count: int) -> list[range]:
    """Split a model's layers into `count` consecutive ranges with about equal weights.

    The first range has the output head too. Layers that share keys and values stay together.

    Raises `ModelError` if the model has fewer places to split it.

    Example:
        >>> split_layers(spec, 2)  # of 4 equal layers, and a head as large as 2 of them
        [range(0, 1), range(1, 4)]
    """
    head = spec.vocab_size * spec.hidden_size
    sums = list(accumulate((layer.num_parameters(spec.hidden_size) for layer in spec.layers), initial=head))
    cuts = [i for i in range(1, spec.num_layers) if _may_split(spec, i)]
    if not 1 <= count <= len(cuts) + 1:
        raise ModelError(
            f"a model with {spec.num_layers} layers can have 1 to {len(cuts) + 1} stages, not {count}"
        )
    ends = [0]
    for number in range(1, count):
        left = [cut for cut in cuts if cut > ends[-1]]
        left = left[: len(left) - (count - 1 - number)]  # one for each later border
        ends.append(min(left, key=lambda cut: abs(sums[cut] - sums[-1] * number / count)))
    return [range(*pair) for pair in pairwise([*ends, spec.num_layers])]


def _may_split(spec: ModelSpec, place: int) -> bool:
    """Whether no layer from `place` on reads keys and values of one before it."""
    return all(source >= place for source in spec.kv_layers[place:])
