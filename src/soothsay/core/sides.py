"""The two sides of a pass of an encoder-decoder: the rows of sources, and those of targets.

A request's tokens are its source, then its target. A source row sees its whole source, and its keys live
within the pass. A target row sees its own path within the target, and across it the whole source. In the KV
pool, the slots of a source have what the decoder reads of it, those of a target the target's own keys.

Example: a request has 3 source tokens, and a target of which `s` is pending. Its tree has the child x.

    row            0   1   2   3   4
    token          a   b   c   s   x
    sees           abc abc abc s   s x
    across                     abc abc
    position       0   1   2   0   1
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.paths import Path
from soothsay.core.transfer import upload
from soothsay.errors import ModelError


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides of a pass of N rows. Logit rows and requests of its batches are those of the whole pass."""

    source: Batch | None  # n rows, row i in slot i; None: the pass reads no source
    slots: Tensor  # [n] int64, those of the source rows in the KV pool
    target: Batch | None  # with `Batch.across`; None: no row is a target's
    rows: Tensor  # [N - n] int64, the target rows of the pass
    num_rows: int  # N

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Split a pass.

        Raises `ModelError` for rows without a source, and `ValueError` if a source is cut.
        """
        counts = [request.num_rows for request in batch.requests]
        lengths = [request.source for request in batch.requests]
        if min(lengths) < 1:
            raise ModelError("an encoder-decoder writes an answer to a source; it does not score texts")
        owner, shift = np.repeat(np.arange(len(counts)), counts), np.repeat(lengths, counts)  # of each row
        is_source = np.zeros(len(batch.tokens), dtype=bool)
        read, begin = list[Path](), 0
        for request, length, first in zip(
            batch.requests, lengths, accumulate(counts, initial=0), strict=False
        ):
            if request.start < length and len(request.tokens):
                if request.start > 0 or len(request.tokens) < length:
                    raise ValueError(f"a source of {length} tokens is read as a whole")
                is_source[first : first + length], shift[first : first + length] = True, 0
                own = np.arange(begin, begin + length)
                read.append(Path(range(begin, begin + length), np.full(length, length - 1), own))
                begin += length
        place = np.cumsum(~is_source) - 1  # of each target row, its place among them
        paths, across = list[Path](), dict[int, Path]()
        for path in batch.paths:
            rows = np.asarray(path.rows)
            kept = ~is_source[rows]
            if not kept.any():
                continue
            number = int(owner[rows[0]])
            length = lengths[number]
            own, keys, shared = place[rows[kept]], path.keys[length:], max(path.shared - length, 0)
            paths.append(Path(own, path.positions[kept] - length, keys, shared))
            if number not in across:
                all_rows = place[(owner == number) & ~is_source]
                across[number] = Path(all_rows, np.full(len(all_rows), length - 1), path.keys[:length])
        places = np.flatnonzero(is_source), np.flatnonzero(~is_source), shift
        sources, targets, shifts = upload([torch.from_numpy(each) for each in places], batch.tokens.device)
        positions, source, target = batch.positions - shifts, None, None
        if read:
            slots = torch.arange(len(sources), device=sources.device)
            source = _rows(batch, sources, positions, slots, read)
        if paths:
            slots = batch.slots.index_select(0, targets)
            seen = _rows(batch, targets, positions, slots, [*across.values()])
            target = _rows(batch, targets, positions, slots, paths, seen)
        return cls(source, batch.slots.index_select(0, sources), target, targets, len(is_source))

    def spread(self, x: Tensor) -> Tensor:
        """Target rows `[N - n, size]` among all rows of the pass, the others being zeros: `[N, size]`."""
        return x.new_zeros(self.num_rows, x.shape[1]).index_copy_(0, self.rows, x)


def _rows(
    batch: Batch,
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    paths: list[Path],
    across: Batch | None = None,
) -> Batch:
    """Some rows of a pass. `positions` are those of all its rows, `slots` those of `rows`."""
    tokens, positions = batch.tokens.index_select(0, rows), positions.index_select(0, rows)
    own = tokens, positions, slots, batch.logit_rows, batch.asked, paths, batch.num_slots, batch.group
    return Batch(*own, batch.windows, requests=batch.requests, across=across)
