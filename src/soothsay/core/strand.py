"""The rows of one request in a pass, as layers with a state read them.

Some rows advance the state: tokens that are committed, one after the other. The rows of a tree, the root
included, leave it as it is. Each is computed from the state after its parent, and what it was computed from
goes to a journal. `soothsay.model.transformer.Transformer.commit` advances the state by the accepted rows of
the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Marks = Sequence[tuple[int, int]]
"""Pairs of a number of tokens and the slot that gets the state after these tokens."""

WITHIN = -1
"""The slot of a state that lives within the pass."""


@dataclass(frozen=True, slots=True)
class Strand:
    """The rows of one request.

    Example:
        Four committed tokens `a b c d` without KV and a tree of `d -> e` and `d -> f` are six rows. The rows
        of `a`, `b` and `c` advance the state; `d`, `e` and `f` are nodes with parents -1, 0 and 0.
    """

    first: int  # its first row in the pass
    advancing: int  # rows that advance the state
    first_node: int  # number of the node of the first row after these
    parents: Sequence[int]  # for each node of the tree up to its last row, its parent; -1: the root has none
    slot: int = WITHIN  # of the state
    is_new: bool = True  # there is no token before the strand: it begins with zeros
    marks: tuple[tuple[int, int], ...] = ()  # (rows that have advanced it, slot that gets the state then)

    @property
    def end(self) -> int:
        """The row after its last one."""
        return self.first + self.advancing + len(self.parents) - self.first_node


def marked(marks: Marks, start: int, count: int) -> tuple[tuple[int, int], ...]:
    """The marks that `count` tokens after `start` tokens reach, by the number of these tokens."""
    return tuple((tokens - start, slot) for tokens, slot in marks if 0 < tokens - start <= count)
