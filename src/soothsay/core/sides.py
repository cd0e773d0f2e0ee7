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

from dataclasses import dataclass, replace
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
        size, first = len(batch.tokens), 0
        owner = np.empty(size, dtype=np.int64)  # of each row, its request
        shift = np.zeros(size, dtype=np.int64)  # of each target row, its request's source tokens
        is_source = np.zeros(size, dtype=bool)
        read: list[Path] = []
        for number, request in enumerate(batch.requests):
            end, length = first + request.num_rows, request.source
            if length < 1:
                raise ModelError("an encoder-decoder writes an answer to a source; it does not score texts")
            owner[first:end], shift[first:end] = number, length
            if request.start < length and len(request.tokens):
                if request.start > 0 or len(request.tokens) < length:
                    raise ValueError(f"a source of {length} tokens is read as a whole")
                begin = int(is_source.sum())
                is_source[first : first + length], shift[first : first + length] = True, 0
                own = np.arange(begin, begin + length)
                read.append(Path(range(begin, begin + length), np.full(length, length - 1), own))
            first = end
        place = np.cumsum(~is_source) - 1  # of each target row, its place among them
        paths, across = list[Path](), dict[int, Path]()
        for path in batch.paths:
            rows = np.asarray(path.rows)
            kept = ~is_source[rows]
            if not kept.any():
                continue
            number = int(owner[rows[0]])
            length = batch.requests[number].source
            own, keys, shared = place[rows[kept]], path.keys[length:], max(path.shared - length, 0)
            paths.append(Path(own, path.positions[kept] - length, keys, shared))
            if number not in across:
                all_rows = place[(owner == number) & ~is_source]
                across[number] = Path(all_rows, np.full(len(all_rows), length - 1), path.keys[:length])
        places = np.flatnonzero(is_source), np.flatnonzero(~is_source), shift
        sources, targets, shifts = upload([torch.from_numpy(each) for each in places], batch.tokens.device)
        slots = torch.arange(len(sources), device=sources.device)
        source = replace(_rows(batch, sources, shifts, read), slots=slots, num_slots=len(slots))
        target = _rows(batch, targets, shifts, paths)
        target = replace(target, across=replace(target, paths=[*across.values()]))
        return cls(
            source if read else None,
            batch.slots.index_select(0, sources),
            target if paths else None,
            targets,
            size,
        )

    def spread(self, x: Tensor) -> Tensor:
        """Target rows `[N - n, size]` among all rows of the pass, the others being zeros: `[N, size]`."""
        return x.new_zeros(self.num_rows, x.shape[1]).index_copy_(0, self.rows, x)


def _rows(batch: Batch, rows: Tensor, shift: Tensor, paths: list[Path]) -> Batch:
    """Some rows of a pass, with other paths and positions that are less by `shift` `[N]`."""
    tokens, positions, slots = (
        own.index_select(0, rows) for own in (batch.tokens, batch.positions - shift, batch.slots)
    )
    return replace(batch, tokens=tokens, positions=positions, slots=slots, paths=paths, stacked=())
