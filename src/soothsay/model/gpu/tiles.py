"""Tiles and splits of linear layers on a GPU.

Splits decide in which order products are added, so they depend on a weight's shape and kind alone. Tiles
change no bit: any tile may take any number of rows.
"""

from dataclasses import dataclass

VERSION = 1
"""Part of the numeric mode. A change of splits is a new version."""

LEAST_INPUTS = 512
"""Limit of inputs of a split: fewer do not fill the pipeline of a program."""

SPAN_UNIT = 128
"""Inputs of a split are a multiple of this."""

MEASURED: dict[tuple[str, int, int], int] = {}
"""Best number of splits as measured on a device: (kind, outputs, inputs) -> splits. Others go by a rule."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at once, and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    enough: int  # programs that keep a device busy


TILES = {
    "float": (
        Tile(16, 64, 128, 4, 4, 264),
        Tile(64, 64, 128, 4, 3, 264),
        Tile(128, 128, 64, 8, 3, 132),
    ),
    "integer": (
        *(Tile(rows, 64, 64, 2, 4, 800) for rows in (8, 16, 32)),
        Tile(64, 64, 64, 4, 3, 400),
        Tile(128, 64, 64, 8, 3, 264),
    ),
}
"""By kind of weight; those for few rows first, the last one for any number."""


def tile_for(kind: str, rows: int) -> Tile:
    """The smallest tile that holds all rows, or the largest one."""
    tiles = TILES[kind]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def span_of(kind: str, outputs: int, inputs: int) -> int:
    """Inputs of a split of a weight `[outputs, inputs]`; the last split may have fewer.

    There are enough splits for the tile of the fewest rows.
    """
    tile = TILES[kind][0]
    columns, splits = -(-outputs // tile.outputs), 1
    while columns * splits < tile.enough and inputs >= 2 * splits * LEAST_INPUTS:
        splits *= 2
    splits = MEASURED.get((kind, outputs, inputs), splits)
    return -(-inputs // splits // SPAN_UNIT) * SPAN_UNIT
