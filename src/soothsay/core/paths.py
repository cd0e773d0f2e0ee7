"""The keys that the rows of a pass attend to: a list of slots for each path, and these lists in rectangles.

A path is a request's context followed by one root-to-leaf path of its tree, **in order of position**: the
order of keys is that of plain decoding. A row sees the keys of its path up to its own position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray

KEY_BLOCK = 128
"""Number of keys in a block. Stock attention pads keys to whole blocks and sums values block by block. A row
then has the same bits for any number of masked keys after its own (measured, see docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Path:
    """Rows that attend to the same list of keys."""

    rows: Sequence[int]  # of the pass
    positions: IntArray  # of the rows
    keys: IntArray  # slots in order of position
    shared: int = 0  # how many of its first keys are those of the path before it


@dataclass(frozen=True, slots=True)
class Lanes:
    """Paths of similar size, padded to one size, for stock operations."""

    size: tuple[int, int, int]  # L paths, m rows each, K keys each
    rows: Tensor  # [L * m] rows of the pass; a path with fewer repeats its first
    keys: Tensor  # [L * K] slots
    bias: dict[int | None, Tensor]  # for each window: [L, m, 1, K], 0 where visible, else -inf

    @classmethod
    def of(cls, rows: Tensor, keys: Tensor, positions: Tensor, windows: Iterable[int | None]) -> Lanes:
        """The lanes of three tensors of `stack_paths`, which may be on a device by now."""
        size = *rows.shape, keys.shape[1]
        bias = {window: _bias(positions[..., None], size[2], window) for window in set(windows)}
        return cls(size, rows.view(-1), keys.view(-1), bias)


def stack_paths(paths: Sequence[Path], num_rows: int, group: int) -> list[Tensor]:
    """Pad `paths` to lanes, paths of similar size together. `group` query heads share a key head.

    Returns:
        `[num_rows]` each row's place among the lanes' concatenated rows; then for each of the lanes `[L, m]`
        rows, `[L, K]` keys and `[L, m]` positions. All are int64, on the CPU.
    """
    min_rows = _min_rows(group)
    buckets: dict[tuple[int, int], list[Path]] = defaultdict(list)
    for path in paths:
        width = 1 << (max(len(path.rows), min_rows) - 1).bit_length()
        buckets[width, (-(-len(path.keys) // KEY_BLOCK)).bit_length()].append(path)
    place = np.empty(num_rows, dtype=np.int64)
    stacked, filled = [place], 0
    for (width, _), members in sorted(buckets.items(), key=lambda item: item[0]):
        for i, path in enumerate(members):
            place[path.rows] = filled + i * width + np.arange(len(path.rows))
        filled += len(members) * width
        stacked += _stack(members, width)
    return [torch.from_numpy(array) for array in stacked]


def _min_rows(group: int) -> int:
    """Minimum number of rows in a lane. For fewer queries, BLAS uses other kernels, with other bits.

    Eight queries are enough in multiples of four, otherwise twelve (measured, see docs/log.md).
    """
    rows = 1
    while rows * group < 8 or (rows * group < 12 and rows * group % 4):
        rows *= 2
    return rows


def _stack(members: Sequence[Path], m: int) -> tuple[IntArray, IntArray, IntArray]:
    num_keys = -(-max(len(path.keys) for path in members) // KEY_BLOCK) * KEY_BLOCK
    rows = np.empty((len(members), m), dtype=np.int64)
    keys = np.zeros((len(members), num_keys), dtype=np.int64)  # padding reads slot 0, always finite
    positions = np.empty((len(members), m), dtype=np.int64)
    for i, path in enumerate(members):
        count = len(path.rows)
        rows[i, :count], rows[i, count:] = path.rows, path.rows[0]
        positions[i, :count], positions[i, count:] = path.positions, path.positions[0]
        keys[i, : len(path.keys)] = path.keys
    return rows, keys, positions


def _bias(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """`[L, m, 1, K]` of rows at `positions` `[L, m, 1]`: 0 for keys that they see, else minus infinity."""
    keys = torch.arange(num_keys, device=positions.device)
    hidden = keys > positions
    if window is not None:
        first = positions - window + 1 if window > 0 else positions // -window * -window
        hidden |= keys < first
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, :, None]
