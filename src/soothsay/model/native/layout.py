"""The layout of a pass in one call of the library."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.batch import Batch, Layout, Rows
from soothsay.core.paths import Path
from soothsay.core.strands import Strands


class _Layout(Structure):
    """`soothsay_layout` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "logit_rows")),
        *((name, c_void_p) for name in ("rows", "row_positions", "key_begin", "row_begin", "shared", "keys")),
    ]


class PathLists(NamedTuple):
    """Paths end to end.

    Path i has `keys[key_begin[i] : key_begin[i + 1]]` and the rows `rows[row_begin[i] : row_begin[i + 1]]`,
    with their `positions`. Its first `shared[i]` keys are those of the path before it.
    """

    rows: IntArray
    positions: IntArray
    key_begin: IntArray
    row_begin: IntArray
    shared: IntArray
    keys: IntArray


@dataclass(frozen=True, slots=True)
class FlatPaths(Sequence[Path]):
    """Paths as the library reads them."""

    room: Tensor  # int64; has the lists of `PathLists`
    begins: Sequence[int]  # their places in it
    num_paths: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> FlatPaths:
        """Lay out paths, if they are not flat."""
        if isinstance(paths, FlatPaths):
            return paths

        def begins(lengths: Iterable[int]) -> IntArray:
            return np.cumsum([0, *lengths], dtype=np.int64)

        lists = PathLists(
            rows=np.array([row for path in paths for row in path.rows], dtype=np.int64),
            positions=np.concatenate([path.positions for path in paths]),
            key_begin=begins(len(path.keys) for path in paths),
            row_begin=begins(len(path.rows) for path in paths),
            shared=np.array([path.shared for path in paths], dtype=np.int64),
            keys=np.concatenate([path.keys for path in paths]),
        )
        places = accumulate(map(len, lists[:-1]), initial=0)
        return cls(torch.from_numpy(np.concatenate(lists)), tuple(places), len(paths))

    @property
    def lists(self) -> PathLists:
        """The lists, without the room that the library left unused."""
        room, count = self.room.numpy(), self.num_paths
        rows, positions, key_begin, row_begin, shared, keys = (room[begin:] for begin in self.begins)
        num_rows, num_keys = row_begin[count], key_begin[count]
        begins = key_begin[: count + 1], row_begin[: count + 1]
        return PathLists(rows[:num_rows], positions[:num_rows], *begins, shared[:count], keys[:num_keys])

    @property
    def pointers(self) -> tuple[int, ...]:
        """The addresses of the lists, in the order of the library's arguments, and the number of paths."""
        start = self.room.data_ptr()
        rows, positions, key_begin, row_begin, shared, keys = (start + 8 * begin for begin in self.begins)
        return keys, key_begin, rows, positions, row_begin, shared, self.num_paths

    def __len__(self) -> int:
        return self.num_paths

    def __getitem__(self, path: Any) -> Any:
        if not 0 <= path < self.num_paths:
            raise IndexError(path)
        flat = self.lists
        own, seen = slice(*flat.row_begin[path : path + 2]), slice(*flat.key_begin[path : path + 2])
        return Path(flat.rows[own].tolist(), flat.positions[own], flat.keys[seen], int(flat.shared[path]))


def path_pointers(batch: Batch) -> tuple[int, ...]:
    """The paths of a pass as arguments of the library."""
    return batch.form(_flat).pointers


def _flat(batch: Batch) -> FlatPaths:
    return FlatPaths.of(batch.paths)


def strand_plan(strands: Strands) -> int:
    """The address of the strands end to end; see `soothsay_delta_rule` in csrc/kernels.h."""
    return strands.form(_plan).buffer_info()[0]


def _plan(strands: Strands) -> array[int]:
    plan = array("q", [len(strands.listed)])
    for s in strands.listed:
        size = len(s.parents)
        plan.extend((s.first, s.advancing, s.first_node, size, s.slot, s.is_new, len(s.marks)))
        plan.extend(s.parents)
        plan.extend(number for mark in s.marks for number in mark)
    return plan


def native_layout(run: Callable[..., None], requests: Sequence[Rows], block_size: int) -> Layout:
    """Lay out the rows of requests, as `LayoutOps` does.

    Args:
        run: the library's `soothsay_lay_out`.
        requests: to lay out one after the other.
        block_size: slots of a KV block.
    """
    plan = array("q")
    num_rows = num_keys = 0
    held, asked = [], []
    for request in requests:
        tree, table, pending = request.tree, request.table, len(request.tokens)
        size = 0 if tree is None else len(tree)
        if table is not None and len(table) * block_size < request.start + pending + max(size - 1, 0):
            raise IndexError("a request has fewer KV blocks than its rows need")
        held.append(array("q", () if table is None else table.tolist()))  # alive until the call
        place = 0 if table is None else held[-1].buffer_info()[0]
        plan.extend((request.start, request.first_key, request.first, size, pending, place))
        plan.extend(request.tokens.tolist())
        leaves, new = 1, max(size - request.first, 0)
        if tree is not None:
            plan.extend(tree.tokens)
            plan.extend(tree.parents)
            leaves = size - len({*tree.parents}) + 1  # the root's parent is no node
        num_rows += pending + new
        asked.append(0 if tree is None else new + min(pending, 1))
        num_keys += leaves * (request.start + pending + size)
    num_logits = sum(asked)
    sizes = (num_rows,) * 3, (num_logits,), (num_rows,) * 2, (num_rows + 1,) * 2, (num_rows, num_keys)
    begins = tuple(accumulate((size for some in sizes for size in some), initial=0))
    room = torch.empty(begins[-1], dtype=torch.int64)
    start, totals = room.data_ptr(), (c_int64 * 2)()
    out = _Layout(*(start + 8 * begin for begin in begins[:-1]))
    run(plan.buffer_info()[0], len(requests), block_size, byref(out), totals)
    wanted = [*sizes[0], num_logits, begins[-1] - begins[4]]
    tokens, positions, slots, logit_rows, _ = room.split_with_sizes(wanted)
    paths = FlatPaths(room, begins[4:-1], totals[0])
    return Layout(tokens, positions, slots, logit_rows, asked, paths, totals[1])
