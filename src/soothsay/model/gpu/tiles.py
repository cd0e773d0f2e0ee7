"""Tiles and splits of linear layers on a GPU.

Splits decide in which order products are added, so they depend on a weight's shape and kind alone, and a
change is a new `VERSION`. Tiles change no bit: any tile may take any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1
"""Part of the numeric mode: with another version, bits may differ."""

LEAST_INPUTS = 512
"""Limit of inputs of a split: fewer do not fill the pipeline of a program."""

ENOUGH_PROGRAMS = 128
"""Tiles of outputs that keep a device busy, so that one program may compute all splits of its tile."""

SPAN_UNIT = 128
"""Inputs of a split are a multiple of this."""

WANTED_PROGRAMS = {"float": 264, "integer": 800}
"""Programs that one tile of rows should have. Those of integers are smaller."""

MEASURED: dict[tuple[str, int, int], int] = {}
"""Best number of splits as measured on a device: (kind, outputs, inputs) -> splits. Others go by a rule."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at once: rows, outputs and inputs; and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = {
    "float": (Tile(16, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3)),
    "integer": (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
}
"""Tiles for few rows first; the last one is for any number."""


def tile_for(kind: str, rows: int) -> Tile:
    """The smallest tile that holds all rows, or the largest one."""
    tiles = TILES[kind]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def span_of(kind: str, outputs: int, inputs: int) -> int:
    """Inputs of a split of a weight `[outputs, inputs]`; the last split may have fewer."""
    columns = -(-outputs // TILES[kind][0].outputs)
    splits = 1
    while columns * splits < WANTED_PROGRAMS[kind] and inputs >= 2 * splits * LEAST_INPUTS:
        splits *= 2
    splits = MEASURED.get((kind, outputs, inputs), splits)
    return -(-inputs // splits // SPAN_UNIT) * SPAN_UNIT
