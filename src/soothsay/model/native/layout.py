"""The layout of a pass in one call of the library."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Layout, Rows
from soothsay.core.paths import Path


class _Layout(Structure):
    """`soothsay_layout` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "logit_rows")),
        *((name, c_void_p) for name in ("rows", "row_positions", "key_begin", "row_begin", "shared", "keys")),
    ]


@dataclass(frozen=True, slots=True)
class NativePaths:
    """The `Paths` that the library wrote."""

    room: Tensor  # int64; has the lists of `FlatPaths`
    begins: tuple[int, ...]  # places in it of rows, positions, key_begin, row_begin, shared and keys
    count: int  # of paths

    @property
    def listed(self) -> tuple[Path, ...]:
        """See `Paths`."""
        room = self.room.numpy()
        rows, positions, key_begin, row_begin, shared, keys = (room[begin:] for begin in self.begins)
        found = []
        for path in range(self.count):
            own, seen = slice(*row_begin[path : path + 2]), slice(*key_begin[path : path + 2])
            found.append(Path(rows[own].tolist(), positions[own], keys[seen], int(shared[path])))
        return tuple(found)

    @property
    def pointers(self) -> tuple[int, ...]:
        """See `Paths`."""
        start = self.room.data_ptr()
        rows, positions, key_begin, row_begin, shared, keys = (start + 8 * begin for begin in self.begins)
        return keys, key_begin, rows, positions, row_begin, shared, self.count


def native_layout(run: Callable[..., None], requests: Sequence[Rows], block_size: int) -> Layout:
    """Lay out the rows of requests, as `stock_layout` does.

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
        if table is not None:
            if len(table) * block_size < request.start + pending + max(size - 1, 0):
                raise IndexError("a request has fewer KV blocks than its rows need")
            held.append(torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64)))  # alive until the call
        place = 0 if table is None else held[-1].data_ptr()
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
    paths = NativePaths(room, begins[4:-1], totals[0])
    return Layout(tokens, positions, slots, logit_rows, asked, paths, totals[1])
