"""The keys that the rows of a pass attend to: a list of slots for each path, and two layouts of the lists.

A path is a request's context followed by one root-to-leaf path of its tree, **in order of position**: the
order of keys is that of plain decoding. A row sees the keys of its path up to its own position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

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


class Paths(Protocol):
    """The paths of a pass, in the two forms that kernels read."""

    @property
    def listed(self) -> tuple[Path, ...]:
        """One by one."""

    @property
    def pointers(self) -> tuple[int, ...]:
        """End to end: the addresses of the tensors in `FlatPaths`, and the number of paths."""


@dataclass(frozen=True)
class PathList:
    """The `Paths` of a list."""

    listed: tuple[Path, ...]

    @cached_property
    def flat(self) -> FlatPaths:
        """End to end."""
        return FlatPaths.of(self.listed)

    @property
    def pointers(self) -> tuple[int, ...]:
        """See `Paths`."""
        return self.flat.pointers


@dataclass(frozen=True)
class FlatPaths:
    """Paths end to end, for kernels that read each path's own list. All tensors are int64, on the CPU.

    Path i has `keys[key_begin[i] : key_begin[i + 1]]` and the rows `rows[row_begin[i] : row_begin[i + 1]]`,
    with their `positions`. Its first `shared[i]` keys are those of the path before it.
    """

    keys: Tensor
    key_begin: Tensor
    rows: Tensor
    positions: Tensor
    row_begin: Tensor
    shared: Tensor

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """Addresses of the tensors, in the order above, and the number of paths."""
        tensors = (self.keys, self.key_begin, self.rows, self.positions, self.row_begin, self.shared)
        return *(tensor.data_ptr() for tensor in tensors), len(self.row_begin) - 1

    @classmethod
    def of(cls, paths: Sequence[Path]) -> FlatPaths:
        """Lay out `paths`."""

        def begins(lengths: Iterable[int]) -> Tensor:
            return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int64))

        rows = [row for path in paths for row in path.rows]
        return cls(
            keys=torch.from_numpy(np.concatenate([path.keys for path in paths])),
            key_begin=begins(len(path.keys) for path in paths),
            rows=torch.tensor(rows, dtype=torch.int64),
            positions=torch.from_numpy(np.concatenate([path.positions for path in paths])),
            row_begin=begins(len(path.rows) for path in paths),
            shared=torch.tensor([path.shared for path in paths], dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class Lanes:
    """Paths of similar size, padded to one size, for stock operations."""

    size: tuple[int, int, int]  # L paths, m rows each, K keys each
    rows: Tensor  # [L * m] rows of the pass; a path with fewer repeats its first
    keys: Tensor  # [L * K] slots
    bias: dict[int | None, Tensor]  # for each window: [L, m, 1, K], 0 where visible, else -inf


def stack_paths(
    paths: Sequence[Path], num_rows: int, group: int, windows: Iterable[int | None], device: torch.device
) -> tuple[tuple[Lanes, ...], Tensor]:
    """Pad `paths` to lanes, paths of similar size together.

    Returns:
        The lanes, and `[num_rows]` int64: each row's place among the lanes' concatenated rows.
    """
    min_rows = _min_rows(group)
    buckets: dict[tuple[int, int], list[Path]] = defaultdict(list)
    for path in paths:
        width = 1 << (max(len(path.rows), min_rows) - 1).bit_length()
        buckets[width, (-(-len(path.keys) // KEY_BLOCK)).bit_length()].append(path)
    place = np.empty(num_rows, dtype=np.int64)
    lanes, filled = [], 0
    for (width, _), members in sorted(buckets.items(), key=lambda item: item[0]):
        for i, path in enumerate(members):
            place[path.rows] = filled + i * width + np.arange(len(path.rows))
        filled += len(members) * width
        lanes.append(_stack(members, width, set(windows), device))
    return tuple(lanes), torch.from_numpy(place).to(device)


def _min_rows(group: int) -> int:
    """Minimum number of rows in a lane. For fewer queries, BLAS uses other kernels, with other bits.

    Eight queries are enough in multiples of four, otherwise twelve (measured, see docs/log.md).
    """
    rows = 1
    while rows * group < 8 or (rows * group < 12 and rows * group % 4):
        rows *= 2
    return rows


def _stack(members: Sequence[Path], m: int, windows: set[int | None], device: torch.device) -> Lanes:
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
            seen = positions - window + 1 if window > 0 else positions // -window * -window
            hidden |= np.arange(num_keys) < seen
        values = np.where(hidden, np.float32("-inf"), np.float32(0))[:, :, None]
        bias[window] = torch.from_numpy(values).to(device)
    return Lanes(
        size=(len(members), m, num_keys),
        rows=torch.from_numpy(rows.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        bias=bias,
    )
