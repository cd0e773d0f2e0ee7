"""Splits and tiles of linear layers, for `soothsay/model/gpu/tiles.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from job import LLAMAS, TINY, Job, Numbers
from stage_bandwidth import cold_layers, linear_shapes, random_linear

from soothsay.model.gpu import tiles

SPLITS = 1, 2, 3, 4, 6, 8, 12, 16
BOTH = [{}, {"enough": 1}, {"enough": 10**6}, {"warps": 8}, {"stages": 3}, {"stages": 6}]
TILES = {
    "float": [*BOTH, {"outputs": 32}, {"outputs": 128}, {"inputs": 64, "stages": 6}],
    "integer": [*BOTH, {"warps": 1}, {"warps": 4}, {"stages": 5}],
}
"""What is changed in the tile for few rows."""


def measure(job: Job) -> Numbers:
    """The best splits of each shape, and the lines for `MEASURED`; then tiles, at the best splits."""
    best: dict[tuple[str, int, int], int] = {}
    shapes = [(size, linear_shapes(shape)) for size, shape in ({"1B": TINY} if job.dry else LLAMAS).items()]
    for dtype in ("bfloat16", "int4"):
        for size, own in shapes:
            for name in ("qkv", "o", "gate_up", "down"):
                yield f"{size} {name} in {dtype}", partial(_splits, job, dtype, own[name], best)
    yield "MEASURED", [f"{key}: {splits}," for key, splits in best.items()]
    for key in [*best][:: len(best) if job.dry else 2]:
        yield f"tiles of {key}", partial(_tiles, job, key, best[key])


def _splits(
    job: Job, dtype: str, shape: tuple[int, int], best: dict[tuple[str, int, int], int]
) -> dict[str, Any]:
    """Microseconds of one row by splits. The best are the fewest that take at most 2% longer than any."""
    kind = "integer" if dtype.startswith("int") else "float"
    key, found = (kind, *shape), dict[str, float]()
    for splits in (1, 2) if job.dry else SPLITS:
        if splits * 2 * tiles.SPAN_UNIT <= shape[1] or splits == 1:
            with patch.dict(tiles.MEASURED, {key: splits}):
                found[str(splits)] = _us(job, dtype, shape)
    least = min(found.values())
    best[key] = next(int(splits) for splits, us in found.items() if us <= 1.02 * least)
    return found | {"best": best[key]}


def _tiles(job: Job, key: tuple[str, int, int], splits: int) -> dict[str, Any]:
    """Microseconds of one row by changes of the tile. A tile that does not compile has none."""
    kind, *shape = key
    found: dict[str, Any] = {}
    for change in TILES[kind][: 2 if job.dry else None]:
        first, *rest = tiles.TILES[kind]
        tile = replace(first, **change)
        with patch.dict(tiles.MEASURED, {key: splits}), patch.dict(tiles.TILES, {kind: (tile, *rest)}):
            try:
                us: Any = _us(job, "bfloat16" if kind == "float" else "int4", (shape[0], shape[1]))
            except Exception as error:
                us = str(error)[:80]
        found[str(change or "as it is")] = us
    return found


def _us(job: Job, dtype: str, shape: tuple[int, int]) -> float:
    layers = cold_layers(random_linear(job, dtype, *shape), job)
    x = torch.randn(1, shape[1], device=job.device).bfloat16()
    run = job.recorded([partial(layer, x) for layer in layers])
    return 1e6 * job.in_turns({"": run}, rounds=1, warm=1)[""] / len(layers)
