"""One forward pass over many requests: their rows packed end to end, and what each row attends to.

A request brings committed tokens whose KV is missing (`tokens`) and, below the last of them, a draft tree.
There is no prompt phase, decode phase or verify phase: a prompt chunk is many tokens and no tree, plain
decoding one token and a tree of one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.engine.tree import DraftTree

IntArray = npt.NDArray[np.int64]

KEY_BLOCK = 128
"""Keys of a row are padded to a multiple of this, and values are summed in blocks of it, one after the other:
a row then gets the same bits however many masked keys follow its own (measured, see docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one request puts into a pass.

    With `ctx = start + len(tokens) - 1`, the root's KV offset: token j of `tokens` has offset and position
    `start + j`; node i of the tree has offset `ctx + i` and position `ctx + depth(i)`.
    """

    tokens: IntArray  # [p] committed tokens without KV; the last one is the tree's root
    start: int  # tokens whose KV is there
    table: IntArray | None = None  # the blocks of the request; None: KV lives in the pass itself
    tree: DraftTree | None = None  # None: no logits are asked for
    first: int = 1  # nodes before this one have their KV already (a tree grown level by level)

    @property
    def num_rows(self) -> int:
        """Rows of the pass that this is."""
        return len(self.tokens) + (0 if self.tree is None else len(self.tree) - self.first)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Rows that attend to the same list of keys, for several lists of about equal size.

    A lane is a request's context followed by one root-to-leaf path of its tree, **in order of position**, so
    that a key stands where it would stand in plain decoding. Row r sees the lane's keys up to its own
    position.
    """

    size: tuple[int, int, int]  # L lanes, m rows each, K keys each
    rows: Tensor  # [L * m] rows of the pass; a lane with fewer repeats its first
    keys: Tensor  # [L * K] slots
    bias: dict[int | None, Tensor]  # by sliding window: [L, m, 1, K], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class Batch:
    """N rows of R requests, ready for `Transformer.forward`. Index tensors serve all layers."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, for the rotary embedding
    slots: Tensor  # [N] int64, where each row's KV goes
    lanes: tuple[Lanes, ...]
    lane_rows: Tensor  # [N] int64, each row's place in the lanes' concatenated rows
    logit_rows: Tensor  # [M] int64, rows of tree nodes, the roots included
    spans: tuple[tuple[int, int], ...]  # each request's share of the logit rows

    @classmethod
    def pack(
        cls,
        requests: Sequence[Rows],
        *,
        block_size: int = 1,
        group: int = 1,
        windows: Sequence[int | None] = (None,),
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Lay out the rows of `requests` one after the other.

        `group` is the number of query heads that share a key head, `windows` the sliding windows in use.
        """
        packer = _Packer(block_size)
        for request in requests:
            packer.add(request)
        return packer.finish(_min_rows(group), set(windows), torch.device(device))


def _min_rows(group: int) -> int:
    """Rows in a lane, at least: for fewer queries BLAS takes other kernels, with other bits.

    Eight queries are enough where they come in fours, and otherwise twelve (measured, see docs/log.md).
    """
    rows = 1
    while rows * group < 8 or (rows * group < 12 and rows * group % 4):
        rows *= 2
    return rows


@dataclass(slots=True)
class _Lane:
    rows: list[int] | range
    positions: IntArray  # [m] of the rows
    keys: IntArray  # [K] slots in order of position


@dataclass(slots=True)
class _Packer:
    block_size: int
    tokens: list[IntArray] = field(default_factory=list)
    positions: list[IntArray] = field(default_factory=list)
    slots: list[IntArray] = field(default_factory=list)
    logit_rows: list[range] = field(default_factory=list)
    lanes: list[_Lane] = field(default_factory=list)
    num_rows: int = 0

    def add(self, request: Rows) -> None:
        base, pending, ctx = self.num_rows, len(request.tokens), request.start + len(request.tokens) - 1
        positions = offsets = np.arange(request.start, ctx + 1)
        tokens = request.tokens
        if request.tree is not None and len(request.tree) > request.first:
            tree, first = request.tree, request.first
            tokens = np.concatenate([tokens, np.array(tree.tokens[first:], dtype=np.int64)])
            positions = np.concatenate([positions, np.array(tree.depths[first:], dtype=np.int64) + ctx])
            offsets = np.concatenate([offsets, np.arange(ctx + first, ctx + len(tree))])
        self.num_rows += len(tokens)
        self.tokens.append(tokens)
        self.positions.append(positions)
        self.slots.append(self._slots(request, base, offsets))
        asks = self.num_rows if request.tree is not None else base
        self.logit_rows.append(range(base + max(pending - 1, 0) if asks > base else asks, asks))
        self._add_lanes(request, base, ctx, positions)

    def _slots(self, request: Rows, base: int, offsets: IntArray) -> IntArray:
        if request.table is None:
            return offsets + base
        return request.table[offsets // self.block_size] * self.block_size + offsets % self.block_size

    def _add_lanes(self, request: Rows, base: int, ctx: int, positions: IntArray) -> None:
        """One lane for each path of the tree; a node on several paths is computed in the first."""
        if not len(positions):
            return
        pending, first = len(request.tokens), request.first
        if request.tree is None or len(request.tree) == max(request.tree.depths) + 1:  # a chain
            keys = self._slots(request, base, np.arange(int(positions[-1]) + 1))
            self.lanes.append(_Lane(range(base, base + len(positions)), positions, keys))
            return
        context = self._slots(request, base, np.arange(ctx + 1))
        placed = set(range(first))
        lead = range(base, base + pending)  # the pending tokens go with the first path
        for path in request.tree.paths():
            new = [node for node in path if node not in placed]
            placed.update(new)
            rows = [*lead, *(base + pending + node - first for node in new)]
            lead = range(0)
            if rows:
                nodes = self._slots(request, base, np.array(path[1:], dtype=np.int64) + ctx)
                self.lanes.append(
                    _Lane(rows, positions[np.array(rows) - base], np.concatenate([context, nodes]))
                )

    def finish(self, min_rows: int, windows: set[int | None], device: torch.device) -> Batch:
        buckets: dict[tuple[int, int], list[_Lane]] = defaultdict(list)
        for lane in self.lanes:
            width = 1 << (max(len(lane.rows), min_rows) - 1).bit_length()
            buckets[width, (-(-len(lane.keys) // KEY_BLOCK)).bit_length()].append(lane)
        place = np.empty(self.num_rows, dtype=np.int64)
        lanes, filled = [], 0
        for (width, _), members in sorted(buckets.items(), key=lambda item: item[0]):
            for i, lane in enumerate(members):
                place[lane.rows] = filled + i * width + np.arange(len(lane.rows))
            filled += len(members) * width
            lanes.append(_stack(members, width, windows, device))
        spans, end = [], 0
        for rows in self.logit_rows:
            spans.append((end, end := end + len(rows)))
        return Batch(
            tokens=torch.from_numpy(np.concatenate(self.tokens)).to(device),
            positions=torch.from_numpy(np.concatenate(self.positions)).to(device),
            slots=torch.from_numpy(np.concatenate(self.slots)).to(device),
            lanes=tuple(lanes),
            lane_rows=torch.from_numpy(place).to(device),
            logit_rows=torch.from_numpy(np.concatenate([np.array(r, np.int64) for r in self.logit_rows])).to(
                device
            ),
            spans=tuple(spans),
        )


def _stack(members: list[_Lane], m: int, windows: set[int | None], device: torch.device) -> Lanes:
    num_keys = -(-max(len(lane.keys) for lane in members) // KEY_BLOCK) * KEY_BLOCK
    rows = np.empty((len(members), m), dtype=np.int64)
    keys = np.zeros((len(members), num_keys), dtype=np.int64)  # padding reads slot 0, always finite
    positions = np.empty((len(members), m, 1), dtype=np.int64)
    for i, lane in enumerate(members):
        count = len(lane.rows)
        rows[i, :count], rows[i, count:] = lane.rows, lane.rows[0]
        positions[i, :count, 0], positions[i, count:, 0] = lane.positions, lane.positions[0]
        keys[i, : len(lane.keys)] = lane.keys
    bias = {}
    for window in windows:
        hidden = np.arange(num_keys) > positions
        if window is not None:
            hidden |= np.arange(num_keys) <= positions - window
        bias[window] = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0)))[:, :, None].to(
            device
        )
    return Lanes(
        size=(len(members), m, num_keys),
        rows=torch.from_numpy(rows.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        bias=bias,
    )
