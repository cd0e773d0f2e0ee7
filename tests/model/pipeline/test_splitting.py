"""Where layers are split between processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY, adapted

from soothsay.errors import ModelError
from soothsay.model.pipeline.pipeline import split_layers
from soothsay.model.specs.model_spec import ModelSpec

FOUR = adapted(TINY, num_layers=4, windows=(None,) * 4)
"""Four layers of 23,040 weights, and a head of 4,656."""

LARGE_HEAD = adapted(FOUR, vocab_size=960)
"""Its head is as large as two layers."""

SHARED = replace(
    FOUR,
    layers=(
        *FOUR.layers[:2],
        *(replace(layer, mixer=replace(layer.mixer, reads=1)) for layer in FOUR.layers[2:]),  # type: ignore[type-var]
    ),
)
"""Its last two layers read keys and values of the one before them."""


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (FOUR, [4]),
        (FOUR, [2, 4]),
        (LARGE_HEAD, [1, 4]),
        (LARGE_HEAD, [1, 2, 4]),
        (adapted(FOUR, vocab_size=9600), [1, 2, 4]),
        (FOUR, [1, 2, 3, 4]),
        (SHARED, [1, 4]),
    ],
)
def test_stages_have_about_equal_weights(config: ModelSpec, ends: list[int]) -> None:
    stages = split_layers(config, len(ends))
    assert stages == [range(*pair) for pair in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("config", "count", "most"), [(FOUR, 0, 4), (FOUR, 5, 4), (SHARED, 3, 2)])
def test_more_stages_than_places_are_refused(config: ModelSpec, count: int, most: int) -> None:
    with pytest.raises(ModelError, match=f"1 to {most} stages, not {count}"):
        split_layers(config, count)
