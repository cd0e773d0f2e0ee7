"""Where the rows of a pass stand that predicts whole blocks: the last token and masks, after a context.

The context has keys and values only, made of the target's features. The rows of a block attend to them and to
each other, later rows included.

Example: a request has features of the tokens at positions 0 to 4, and the context rows of 3 and 4 are new.
Token 5 is the last one. Blocks have 3 rows. The drafter's pool keeps the context row of position p at the
request's slot p + 1 (see `features.FeatureKV`), and those of a block in scratch slots at the pool's end:

    row        0    1    2    3    4
    is         feature   token mask mask
    position   3    4    5    6    7
    slot       4    5    s    s+1  s+2
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.batch import Batch, Rows
from soothsay.core.paths import Path
from soothsay.core.transfer import upload
from soothsay.drafters.base import Target


@dataclass(frozen=True, slots=True)
class RowVisibility:
    """What the rows of a block see, in one kind of layer."""

    causal: bool = False
    """Whether a row sees the rows of its block up to itself only."""

    window: int | None = None
    """How many positions a row sees to either side, its own included. None: all."""

    from_anchor: bool = False
    """Whether all rows see the same `window` positions before the block, and the block itself besides."""


@dataclass(frozen=True, slots=True)
class BlockPass:
    """The rows of a pass: C of contexts, then R blocks of B rows."""

    num_blocks: int  # R
    tokens: Tensor  # [R * B] int64, the blocks' tokens
    positions: Tensor  # [C + R * B] int64
    slots: Tensor  # [C + R * B] int64
    seen: Mapping[RowVisibility, Batch]  # the keys of the blocks' rows, for each kind of layer


class BlockPacker:
    """Lays out passes.

    Args:
        target: whose blocks and slots the drafter's pool has.
        size: rows of a block, B.
        mask: the token of all rows but the first.
        sights: kinds of layers.
        group: query heads that share a key head.
    """

    def __init__(self, target: Target, size: int, mask: int, sights: Collection[RowVisibility], group: int):
        self.block_size, self.device = target.config.block_size, target.model.device
        self.scratch = target.num_blocks * self.block_size
        self.size, self.mask, self.sights, self.group = size, mask, frozenset(sights), group

    def pack(self, rows: Sequence[Rows]) -> BlockPass:
        """Lay out a pass. Rows with a tree have a block after their last token."""
        contexts = [np.arange(r.start, r.start + len(r.tokens)) for r in rows]
        ends = [r for r in rows if r.tree is not None]
        firsts = [r.start + len(r.tokens) - 1 for r in ends]  # positions of the blocks' first rows
        positions = [*(c - 1 for c in contexts), *(first + np.arange(self.size) for first in firsts)]
        count = len(ends) * self.size
        scratch = self.scratch + np.arange(count)
        slots = [*(self._slots(r, c) for r, c in zip(rows, contexts, strict=True)), scratch]
        tokens = np.full((len(ends), self.size), self.mask, dtype=np.int64)
        tokens[:, 0] = [r.tokens[-1] for r in ends]
        block_tokens = self._tensor(tokens.reshape(-1))
        blocks = [
            (self._slots(r, np.arange(r.first_key, first + 1)), own)
            for r, first, own in zip(ends, firsts, scratch.reshape(-1, self.size), strict=True)
        ]
        return BlockPass(
            num_blocks=len(ends),
            tokens=block_tokens,
            positions=self._tensor(np.concatenate(positions)),
            slots=self._tensor(np.concatenate(slots)),
            seen={sight: self._batch(sight, blocks, block_tokens) for sight in self.sights} if ends else {},
        )

    def _batch(
        self, sight: RowVisibility, blocks: Sequence[tuple[IntArray, IntArray]], tokens: Tensor
    ) -> Batch:
        """The keys of the blocks' rows. A block is the slots of its context, and its own."""
        paths: list[Path] = []
        for number, (context, own) in enumerate(blocks):
            rows = range(number * self.size, (number + 1) * self.size)
            paths += self._paths(sight, context, own, rows)
        none = torch.empty(0, dtype=torch.int64)
        return Batch(tokens, none, none, none, (), paths, 0, self.group, (None,))

    def _paths(self, sight: RowVisibility, context: IntArray, own: IntArray, rows: range) -> list[Path]:
        size, window = self.size, sight.window
        if window is None or sight.from_anchor:  # all rows see the same context
            known = context if window is None else context[len(context) - min(window, len(context)) :]
            last = len(known) + (np.arange(size) if sight.causal else np.full(size, size - 1))
            return [Path(rows, last, np.concatenate([known, own]))]
        paths = []
        for row in range(size):
            count = min(max(window - row - 1, 0), len(context))
            end = row + 1 if sight.causal else min(row + window, size)
            keys = np.concatenate([context[len(context) - count :], own[max(row - window + 1, 0) : end]])
            paths.append(Path([rows[row]], np.array([len(keys) - 1]), keys))
        return paths

    def _slots(self, rows: Rows, offsets: IntArray) -> IntArray:
        assert rows.table is not None
        return rows.table[offsets // self.block_size] * self.block_size + offsets % self.block_size

    def _tensor(self, values: IntArray) -> Tensor:
        [there] = upload([torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))], self.device)
        return there
