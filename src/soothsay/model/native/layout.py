"""The layout of a pass in one call of the library."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.batch import Batch, Rows, Windows, blind
from soothsay.core.paths import Path
from soothsay.core.strands import Strands


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


@dataclass(slots=True)
class FlatPaths(Sequence[Path]):
    """Paths as the library reads them."""

    room: array[int]  # has the lists of `PathLists`
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
        return cls(array("q", np.concatenate(lists).tobytes()), tuple(places), len(paths))

    @property
    def lists(self) -> PathLists:
        """The lists, without the room that the library left unused."""
        room, count = np.frombuffer(self.room, dtype=np.int64), self.num_paths
        rows, positions, key_begin, row_begin, shared, keys = (room[begin:] for begin in self.begins)
        num_rows, num_keys = row_begin[count], key_begin[count]
        begins = key_begin[: count + 1], row_begin[: count + 1]
        return PathLists(rows[:num_rows], positions[:num_rows], *begins, shared[:count], keys[:num_keys])

    @property
    def pointers(self) -> tuple[int, ...]:
        """The addresses of the lists, in the order of the library's arguments, and the number of paths."""
        start = self.room.buffer_info()[0]
        rows, positions, key_begin, row_begin, shared, keys = [start + 8 * begin for begin in self.begins]
        return keys, key_begin, rows, positions, row_begin, shared, self.num_paths

    def __len__(self) -> int:
        return self.num_paths

    def __getitem__(self, path: Any) -> Any:
        return [*self][path]

    def __iter__(self) -> Iterator[Path]:
        rows, positions, *begins, shared, keys = self.lists
        (key_begin, row_begin), places = map(pairwise, map(np.ndarray.tolist, begins)), shared.tolist()
        for seen, own, common in zip(key_begin, row_begin, places, strict=True):
            yield Path(rows[slice(*own)].tolist(), positions[slice(*own)], keys[slice(*seen)], common)


def path_pointers(batch: Batch) -> tuple[int, ...]:
    """The paths of a pass as arguments of the library."""
    paths = batch.paths
    return paths.pointers if isinstance(paths, FlatPaths) else batch.form(_flat).pointers


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


class NativeBatch(Batch):
    """A pass in memory that the library has written. Tensors of its parts are made once they are read."""

    room: array[int]  # `Places` of csrc/layout.h
    num_rows: int

    @cached_property
    def tokens(self) -> Tensor:
        """See `Batch`."""
        return self._part(2, self.num_rows)

    @cached_property
    def positions(self) -> Tensor:
        """See `Batch`."""
        return self._part(2 + self.num_rows, self.num_rows)

    @cached_property
    def slots(self) -> Tensor:
        """See `Batch`."""
        return self._part(2 + 2 * self.num_rows, self.num_rows)

    @cached_property
    def logit_rows(self) -> Tensor:
        """See `Batch`."""
        return self._part(2 + 3 * self.num_rows, sum(self.asked))

    @cached_property
    def paths(self) -> FlatPaths:
        """See `Batch`."""
        rows = self.num_rows
        begin = 2 + 3 * rows + sum(self.asked)
        begins = [begin + place for place in (0, rows, 2 * rows, 3 * rows + 1, 4 * rows + 2, 5 * rows + 2)]
        return FlatPaths(self.room, begins, self.room[0])

    def _part(self, begin: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(self.room, dtype=torch.int64, count=count, offset=8 * begin)


_ZERO = array("q", [0])


def native_batch(
    lay_out: Callable[..., None], requests: Sequence[Rows], block_size: int, group: int, windows: Windows
) -> NativeBatch:
    """Lay out the rows of requests, as `LayoutOps.pack_rows` does.

    Args:
        lay_out: the library's `soothsay_lay_out`.
        requests: at least one row in all.
        block_size: slots of a KV block.
        group: query heads that share a key head.
        windows: those of the model's layers.
    """
    plan = array("q")
    asked: list[int] = []
    num_rows = num_keys = planned = 0
    for request in requests:
        tokens, start, table, tree, first, first_key, *_ = request
        pending, size, leaves = len(tokens), 0, 1
        if first_key > start:
            raise blind(request)
        blocks = -1 if table is None else len(table)
        if tree is not None:
            size = len(tree.tokens)
            leaves = size - len({*tree.parents}) + 1 if size > 1 else 1  # the root's parent is no node
        end, new = start + pending, max(size - first, 0)
        plan.extend((start, first_key, first, size, pending, blocks))
        plan.frombytes(tokens.tobytes())
        if table is not None:
            if blocks * block_size < end + max(size - 1, 0):
                raise IndexError("a request has fewer KV blocks than its rows need")
            plan.frombytes(table.tobytes())
            planned += blocks
        if tree is not None:
            plan.extend(tree.tokens)
            plan.extend(tree.parents)
        num_rows += pending + new
        num_keys += leaves * (end + size)
        planned += 6 + pending + 2 * size
        asked.append(new + min(pending, 1) if size else 0)
    if len(plan) != planned:
        raise TypeError("tokens and tables of blocks must be int64")
    num_logits = sum(asked)
    room = _ZERO * (4 + 8 * num_rows + num_logits + num_keys)
    lay_out(plan.buffer_info()[0], len(requests), block_size, num_rows, num_logits, room.buffer_info()[0])
    batch = NativeBatch.__new__(NativeBatch)
    own = {"room": room, "num_rows": num_rows, "asked": asked, "num_slots": room[1], "stacked": ()}
    vars(batch).update(own, requests=requests, group=group, windows=windows)
    return batch
