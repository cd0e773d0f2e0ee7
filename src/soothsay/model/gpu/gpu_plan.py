"""The plan of a pass: which tiles of rows meet which keys. One list of int32 goes to the device.

A row sees the keys of its path. Key p of a path is at offset p up to its request's `ctx`, where the tree's
root is, and at offset `ctx + node` beyond, where `node` is the path's node of depth p - ctx. With a shift
added, an offset is in slot `tables[offset / page] * page + offset % page`, in the tables of all requests end
to end. No list of all keys is made.

The list has a header, then five parts:

    header   [8]          number of items, of folds, of rows; begin of folds, rows, tables, nodes; 0
    items    [n, 4 + m]   a tile and one of its chunks
    folds    [n, 4 + m]   a tile of a long prompt: one program takes all its chunks
    rows     [N, 2]       a row's position, and the place of its first partial result; -1: it has none. The
                          last one is repeated for the rows with which `gpu_passes` fills a pass
    tables                blocks of all requests
    nodes                 of all paths, each from the root on

A tile has: begin of its nodes, `ctx`, shift, chunk; then its rows, -1 for none.

Chunks of context alone have one tile for all rows of a request. Others have tiles for each path of its tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IdArray, IntArray
from soothsay.core.batch import Batch, Layout, LayoutOps, Rows
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
    """Rows that meet the same keys, in order of position if `end` is 0."""

    nodes: int
    ctx: int
    shift: int
    rows: Sequence[int]
    begin: int = 0  # the first chunk
    end: int = 0  # after the last chunk; 0: as the last row of each tile needs


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
    packer = Packer(block_size)
    for request in requests:
        packer.add(request)
    return packer.finish(requests, group)


def plan_of(batch: Batch) -> tuple[AttentionPlan, Tensor]:
    """The plan of a pass, and its list on the device; made of its paths if it was laid out elsewhere."""
    if isinstance(batch.paths, AttentionPlan):
        return batch.paths, batch.stacked[0]
    packer, places = Packer(1), np.zeros(len(batch.tokens), dtype=np.int64)
    for path in batch.paths:
        rows = [path.rows[at] for at in np.argsort(path.positions, kind="stable")]
        packer.groups.append(Group(0, FAR, packer.add_table(path.keys), rows))
        places[path.rows] = path.positions
    plan, numbers = packer.plan(places, np.concatenate(packer.tables), batch.group)
    return plan, upload([numbers], batch.tokens.device)[0]


@dataclass(slots=True)
class Packer:
    """Lays out the rows of a pass. Lists grow faster than arrays, as most requests have few rows."""

    block_size: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    hidden: list[tuple[int, int, int]] = field(default_factory=list)  # positions before the paths of rows
    offsets: list[int] = field(default_factory=list)  # of rows, with their shift
    logit_rows: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    tables: list[IntArray] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    filled: int = 0  # blocks in `tables`
    within: int = 0  # slots of keys within the pass

    def add_table(self, table: IntArray) -> int:
        """Append blocks, and return the shift of offsets in them."""
        self.tables.append(table)
        self.filled += len(table)
        return (self.filled - len(table)) * self.block_size

    def add(self, request: Rows) -> None:
        """Append the rows of a request."""
        tree, pending, first, page = request.tree, len(request.tokens), request.first, self.block_size
        base, start, size = len(self.tokens), request.start, 1 if tree is None else len(tree)
        ctx = start + pending - 1
        if request.table is None:
            table, shift = np.arange(base // page, (base + ctx + size - 1) // page + 1), base % page
            self.within = max(self.within, base + ctx + size)
        else:
            table, shift = request.table[: (ctx + size - 1) // page + 1], 0
            if len(table) * page < ctx + size:
                raise IndexError("a request has fewer KV blocks than its rows need")
        shift += self.add_table(table)
        self.tokens += request.tokens.tolist()
        self.positions += range(start, ctx + 1)
        self.offsets += range(shift + start, shift + ctx + 1)
        if tree is not None:
            self.tokens += tree.tokens[first:]
            self.positions += [ctx + depth for depth in tree.depths[first:]]
            self.offsets += range(shift + ctx + first, shift + ctx + size)
        end = len(self.tokens)
        asks = range(end if tree is None else base + max(pending - 1, 0), end)
        self.logit_rows += asks
        self.asked.append(len(asks))
        if request.first_key:
            self.hidden.append((base, end, request.first_key))
        if end > base:
            self._add_groups(request, base, ctx - request.first_key, shift + request.first_key)

    def _add_groups(self, request: Rows, base: int, ctx: int, shift: int) -> None:
        """Add the groups of a request. `ctx` and `shift` are of the first key that its rows see."""
        tree, pending, first = request.tree, len(request.tokens), request.first
        end = len(self.tokens)
        alone = Group(0, FAR, shift, range(base, end))
        if tree is None or len(tree) == max(tree.depths) + 1:  # a chain
            self.groups.append(alone)
            return
        lead = [base] if pending == 1 else []
        if pending > 1:
            self.groups.append(alone._replace(rows=range(base, base + pending)))
        whole = (ctx + 1) // CHUNK  # chunks of context alone
        own = base + pending - first  # the row of a node that has one is `own + node`
        if whole:
            self.groups.append(alone._replace(rows=[*lead, *range(own + first, end)], end=whole))
        placed = set(range(first))
        for path in tree.paths():
            rows = [*lead, *(own + node for node in path if node not in placed)]
            if rows:
                self.groups.append(Group(len(self.nodes), ctx, shift, rows, whole))
                self.nodes += path
                placed.update(path)
                lead = []

    def finish(self, requests: Sequence[Rows], group: int) -> Layout:
        """The layout of all requests. `group` query heads share a key head."""
        tables, page = np.concatenate(self.tables), self.block_size
        lists = self.tokens, self.positions, self.logit_rows, self.offsets
        tokens, positions, logit_rows, offsets = (np.array(each, dtype=np.int64) for each in lists)
        places = positions.copy()
        for begin, end, count in self.hidden:
            places[begin:end] -= count
        plan, numbers = self.plan(places, tables, group)
        return Layout(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(tables[offsets // page] * page + offsets % page),
            logit_rows=torch.from_numpy(logit_rows),
            asked=self.asked,
            paths=replace(plan, requests=tuple(requests)),
            num_slots=self.within or (int(tables.max()) + 1) * page,
            lanes=[numbers],
        )

    def plan(self, places: IntArray, tables: IntArray, group: int) -> tuple[AttentionPlan, Tensor]:
        """The plan, and its list, of the places of all rows on their paths and the tables end to end."""
        tile = TILES[max(len(some.rows) for some in self.groups) * group > TILES[0]]
        size = max(tile // group, 1)
        chunks = places // CHUNK + 1  # of each row
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
                record = [*some[:3], 0, *own, *[-1] * (size - len(own))]
                if is_folded:
                    folds.append(record)
                else:
                    tiles.append(record)
                    begins.append(some.begin)
                    ends.append(some.end or last[own[-1]])
            if is_folded:
                chunks[rows] = 0
        items = _items(np.array(tiles, dtype=np.int32).reshape(-1, 4 + size), begins, ends)
        results = chunks.cumsum()  # until after each row's
        rows_part = np.stack([places, np.where(chunks, results - chunks, -1)], axis=1)
        rows_part = rows_part[np.arange(padded_rows(len(places))).clip(max=len(places) - 1)]
        lists: list[Any] = [items.ravel(), *folds, rows_part.ravel(), tables, self.nodes]
        counts = items.size, len(folds) * (4 + size), rows_part.size, len(tables)
        begin_of = [*accumulate(counts, initial=8)][1:]
        header = [len(items), len(folds), len(rows_part), *begin_of, 0]
        odd = [0] * ((begin_of[-1] + len(self.nodes)) % 2)  # an upload takes numbers of 8 bytes
        numbers = np.concatenate([header, *lists, odd], dtype=np.int32, casting="unsafe")
        plan = AttentionPlan(self.block_size, tile, size, len(items), len(folds), int(results[-1]))
        return plan, torch.from_numpy(numbers)


def _items(tiles: IdArray, begins: Sequence[int], ends: Sequence[int]) -> IdArray:
    """Each tile once for each of its chunks."""
    counts = np.array(ends, dtype=np.int64) - np.array(begins, dtype=np.int64)
    items = tiles.repeat(counts, axis=0)
    before = counts.cumsum() - counts - begins
    items[:, 3] = np.arange(len(items)) - before.repeat(counts)
    return items
