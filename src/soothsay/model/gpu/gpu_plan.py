"""The plan of a pass: which tiles of rows meet which keys. One list of int32 goes to the device.

A row sees the keys of its path. Key p of a path is at offset p up to its request's `ctx`, where the tree's
root is, and at offset `ctx + node` beyond, where `node` is the path's node of depth p - ctx. With a shift
added, an offset is in slot `table[offset / page] * page + offset % page`. No list of all keys is made.

The list has a header, then five parts:

    header   [8]          number of items, of folds, of rows; begin of folds, rows, tables, nodes; 0
    items    [n, 5 + m]   a tile and one of its chunks
    folds    [n, 5 + m]   a tile of a long prompt: one program takes all its chunks
    rows     [N, 2]       a row's position, and the place of its first partial result; -1: it has none. The
                          last one is repeated for the rows with which `gpu_passes` fills a pass
    tables                blocks of each request
    nodes                 of each path, from the root on

A tile has: begin of its table, begin of its nodes, `ctx`, shift, chunk; then its rows, -1 for none.

Chunks of context alone have one tile for all rows of a request. Others have tiles for each path of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IdArray, IntArray
from soothsay.core.batch import Batch, Layout, LayoutOps, Packer, Rows
from soothsay.core.paths import Path
from soothsay.core.transfer import upload

KEYS, CHUNK, RUN = 64, 256, 4
"""Keys of a block, keys of a chunk, chunks of a run: part of the numeric mode."""
TILES = 16, 64
"""Queries of a tile: the first where all queries that meet the same keys fit. No bit depends on it."""
FOLD = 128
"""A prompt of more rows takes one program a tile for all chunks. Passes that graphs hold have none. No bit
depends on it."""
FAR = 1 << 30
"""`ctx` of rows without a tree: the key at position p is at offset p."""


ROOMS = 16, 32, 64, 128
"""Rows of recorded passes. Larger passes are not recorded: their launches cost little."""


def padded_rows(rows: int) -> int:
    """Rows of the smallest recorded pass that has room for so many; or else `rows`."""
    return next((room for room in ROOMS if rows <= room), rows)


class Group(NamedTuple):
    """Rows that meet the same keys, in order of position."""

    table: int
    nodes: int
    ctx: int
    shift: int
    rows: Sequence[int]
    begin: int = 0  # the first chunk
    end: int = 0  # after the last chunk; 0: that of the last row


@dataclass(frozen=True)
class AttentionPlan(Sequence[Path]):
    """What the host knows of a plan. As a sequence, it lists the paths as stock operations read them."""

    page: int  # slots of a block
    tile: int  # queries
    rows: int  # of a tile
    items: int
    folds: int
    places: int  # of partial results
    requests: Sequence[Rows] = ()

    @cached_property
    def paths(self) -> Sequence[Path]:
        """The keys of each path, one by one."""
        return LayoutOps().lay_out(self.requests, self.page, 1).paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, path: Any) -> Any:
        return self.paths[path]


def lay_out(requests: Sequence[Rows], block_size: int, group: int) -> Layout:
    """See `LayoutOps`. `Layout.paths` is an `AttentionPlan`, whose list is the only one of `Layout.lanes`."""
    packer = PlanPacker(block_size)
    for request in requests:
        packer.add(request)
    return packer.finish(group)


def plan_of(batch: Batch) -> tuple[AttentionPlan, Tensor]:
    """The plan of a pass, and its list on the device; made of its paths if it was laid out elsewhere."""
    if isinstance(batch.paths, AttentionPlan):
        return batch.paths, batch.stacked[0]
    packer = PlanPacker(1)
    positions = np.zeros(len(batch.tokens), dtype=np.int64)
    for path in batch.paths:
        packer.groups.append(Group(packer.add_table(path.keys), 0, FAR, 0, path.rows))
        positions[path.rows] = path.positions
    packer.places.append(positions)
    plan, numbers = packer.plan(batch.group)
    return plan, upload([numbers], batch.tokens.device)[0]


@dataclass(slots=True)
class PlanPacker(Packer):
    """Lays out the rows of a pass, and plans attention."""

    groups: list[Group] = field(default_factory=list)
    tables: list[IntArray] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    places: list[IntArray] = field(default_factory=list)  # of rows on their paths
    requests: list[Rows] = field(default_factory=list)
    filled: int = 0  # of `tables`

    def add_table(self, table: IntArray) -> int:
        """Append blocks, and return where they begin."""
        self.tables.append(table)
        self.filled += len(table)
        return self.filled - len(table)

    def add_paths(self, request: Rows, base: int, ctx: int, positions: IntArray) -> None:
        """Add the groups of a request; see `Packer`."""
        tree, pending, first, shift = request.tree, len(request.tokens), request.first, request.first_key
        size, page = 1 if tree is None else len(tree), self.block_size
        self.requests.append(request)
        self.places.append(positions - shift if shift else positions)
        ctx -= shift
        if request.table is None:
            table = np.arange(base // page, (base + shift + ctx + size - 1) // page + 1)
            shift += base % page
        else:
            table = request.table[: (shift + ctx + size - 1) // page + 1]
        self.num_slots = max(self.num_slots, (int(table.max()) + 1) * page)
        begin = self.add_table(table)
        alone = Group(begin, 0, FAR, shift, range(base, base + len(positions)))
        if tree is None or size == max(tree.depths) + 1:  # a chain
            self.groups.append(alone)
            return
        lead = [base] if pending == 1 else []
        if pending > 1:
            self.groups.append(alone._replace(rows=range(base, base + pending)))
        whole = (ctx + 1) // CHUNK  # chunks of context alone
        own = base + pending - first  # the row of a node that has one is `own + node`
        if whole:
            rows = [*lead, *range(own + first, own + size)]
            self.groups.append(alone._replace(rows=rows, end=whole))
        placed = set(range(first))
        for path in tree.paths():
            rows = [*lead, *(own + node for node in path if node not in placed)]
            if rows:
                self.groups.append(Group(begin, len(self.nodes), ctx, shift, rows, whole))
                self.nodes += path
                placed.update(path)
                lead = []

    def finish(self, group: int) -> Layout:
        """See `Packer`."""
        plan, numbers = self.plan(group)
        return self.laid_out(plan, [numbers])

    def plan(self, group: int) -> tuple[AttentionPlan, Tensor]:
        """The plan, and its list."""
        tile = TILES[max(len(some.rows) for some in self.groups) * group > TILES[0]]
        size = max(tile // group, 1)
        positions = np.concatenate(self.places)
        chunks = positions // CHUNK + 1  # of each row
        last = chunks.tolist()
        tiles: list[list[int]] = []
        folds: list[list[int]] = []
        begins: list[int] = []
        ends: list[int] = []
        for some in self.groups:
            rows = some.rows
            is_folded = some.ctx == FAR and not some.end and len(rows) > FOLD
            for at in range(0, len(rows), size):
                own = rows[at : at + size]
                record = [*some[:4], 0, *own, *[-1] * (size - len(own))]
                if is_folded:
                    folds.append(record)
                else:
                    tiles.append(record)
                    begins.append(some.begin)
                    ends.append(some.end or last[own[-1]])
            if is_folded:
                chunks[rows] = 0
        items = _items(np.array(tiles, dtype=np.int32).reshape(-1, 5 + size), begins, ends)
        places = chunks.cumsum()
        rows_part = np.stack([positions, np.where(chunks, places - chunks, -1)], axis=1)
        rows_part = np.pad(rows_part, ((0, padded_rows(len(rows_part)) - len(rows_part)), (0, 0)), "edge")
        lists: list[Any] = [items.ravel(), *folds, rows_part.ravel(), *self.tables, self.nodes]
        counts = items.size, len(folds) * (5 + size), rows_part.size, self.filled
        begin_of = [*accumulate(counts, initial=8)][1:]
        header = [len(items), len(folds), len(rows_part), *begin_of, 0]
        odd = [0] * ((begin_of[-1] + len(self.nodes)) % 2)  # an upload takes numbers of 8 bytes
        numbers = np.concatenate([header, *lists, odd], dtype=np.int32, casting="unsafe")
        known = self.block_size, tile, size, len(items), len(folds), int(places[-1]), tuple(self.requests)
        return AttentionPlan(*known), torch.from_numpy(numbers)


def _items(tiles: IdArray, begins: Sequence[int], ends: Sequence[int]) -> IdArray:
    """Each tile once for each of its chunks."""
    counts = np.array(ends, dtype=np.int64) - np.array(begins, dtype=np.int64)
    items = tiles.repeat(counts, axis=0)
    before = counts.cumsum() - counts - begins
    items[:, 4] = np.arange(len(items)) - before.repeat(counts)
    return items
