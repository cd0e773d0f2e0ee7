"""The rows of a pass as layers with a state read them: one strand a request.

Some rows advance the state: tokens that are committed, one after the other. The rows of a tree, the root
included, leave it as it is. Each is computed from the state after its parent, and what it was computed from
goes to a journal. `soothsay.core.cache.KVPool.commit` advances the state by the accepted rows of the journal.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Marks = Sequence[tuple[int, int]]
"""For some numbers of tokens, the slot that gets the state after these tokens."""

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


@dataclass(frozen=True)
class Strands:
    """The strands of a pass, in two forms."""

    listed: tuple[Strand, ...]

    @cached_property
    def plan(self) -> array[int]:
        """End to end, as kernels read them; see `soothsay_delta_rule` in csrc/kernels.h."""
        plan = array("q", [len(self.listed)])
        for s in self.listed:
            size = len(s.parents)
            plan.extend((s.first, s.advancing, s.first_node, size, s.slot, s.is_new, len(s.marks)))
            plan.extend(s.parents)
            plan.extend(number for mark in s.marks for number in mark)
        return plan


def marked(marks: Marks, start: int, count: int) -> tuple[tuple[int, int], ...]:
    """The marks that `count` tokens after `start` tokens reach, by the number of these tokens."""
    return tuple((tokens - start, slot) for tokens, slot in marks if 0 < tokens - start <= count)
