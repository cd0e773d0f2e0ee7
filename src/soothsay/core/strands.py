"""The rows of a pass as layers with a state read them: one strand a request.

Some rows advance the state: tokens that are committed, one after the other. The rows of a tree, the root
included, leave it as it is. Each is computed from the state after its parent, and what it was computed from
goes to a journal. `soothsay.model.transformer.Transformer.commit` advances the state by the accepted rows of
the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.core.forms import HasForms
from soothsay.core.transfer import upload

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


@dataclass(frozen=True)
class Windows:
    """The places of a convolution's inputs, and what is kept of them. All are int64.

    Places count inputs that stand in one line: a zero, the last inputs of states, nodes in journals, and the
    rows of the pass.

    Example:
        A new request has the rows `a b` that advance its state, and a tree of `c` with the child `d`. With
        three taps the rows have the places 1, 2, 3 and 4. The windows are `0 0 1`, `0 1 2`, `1 2 3` and
        `2 3 4`. The state after the pass has the inputs `1 2`.
    """

    slots: Tensor  # [S] of the states whose last inputs stand in the line
    kept: tuple[Tensor, Tensor]  # [J] each: slots and nodes in journals whose inputs stand in the line
    rows: Tensor  # [N, taps] the places of each row's window, its own last
    end_slots: Tensor  # [K] slots that get a state
    ends: Tensor  # [K, taps - 1] the places of these states
    noted: tuple[Tensor, Tensor]  # [M] each: slots and nodes in journals that get inputs
    noted_rows: Tensor  # [M] the rows that are their inputs


class WindowPlanner:
    """Finds the windows of a pass.

    Args:
        strands: the rows of each request.
        taps: tokens that a window covers, at least 2.
    """

    def __init__(self, strands: Sequence[Strand], taps: int):
        self.strands, self.before = strands, taps - 1
        self.slots = [s.slot for s in strands if _has_state(s)]
        self.kept = [(s.slot, node) for s in strands for node in range(s.first_node)]
        self.first = 1 + len(self.slots) * self.before + len(self.kept)
        self.rows = list[list[int]]()
        self.ends = list[tuple[int, list[int]]]()
        self.noted = list[tuple[int, int, int]]()

    def plan(self, device: torch.device) -> Windows:
        """The windows, on a device."""
        state, node = 1, 1 + len(self.slots) * self.before
        for strand in self.strands:
            start = [0] * self.before
            if _has_state(strand):
                start = [*range(state, state + self.before)]
                state += self.before
            self._add(strand, start, node)
            node += strand.first_node

        def tensor(values: Sequence[object], *shape: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).view(*shape)

        slots, kept, rows, end_slots, ends, noted = upload(
            [
                tensor(self.slots, -1),
                tensor(self.kept, -1, 2).t(),
                tensor(self.rows, -1, self.before + 1),
                tensor([slot for slot, _ in self.ends], -1),
                tensor([places for _, places in self.ends], -1, self.before),
                tensor(self.noted, -1, 3).t(),
            ],
            device,
        )
        return Windows(slots, (kept[0], kept[1]), rows, end_slots, ends, (noted[0], noted[1]), noted[2])

    def _add(self, s: Strand, start: list[int], first_kept: int) -> None:
        """Add a request's rows. `start`: places of its state; `first_kept`: of its first kept node."""
        before, place = self.before, self.first + s.first
        line = [*start, *range(place, place + s.advancing)]
        self.rows += [line[i : i + before + 1] for i in range(s.advancing)]
        reached = [*s.marks, (s.advancing, s.slot)] if s.slot != WITHIN and s.advancing else s.marks
        self.ends += [(slot, line[count : count + before]) for count, slot in reached]
        windows = {-1: line[-before - 1 :]}
        for node, parent in enumerate(s.parents):
            own = first_kept + node
            if node >= s.first_node:
                row = s.first + s.advancing + node - s.first_node
                own = self.first + row
                if s.slot != WITHIN:
                    self.noted.append((s.slot, node, row))
            windows[node] = [*windows[parent][-before:], own]
            if node >= s.first_node:
                self.rows.append(windows[node])


def _has_state(strand: Strand) -> bool:
    return strand.slot != WITHIN and not strand.is_new


@dataclass(frozen=True)
class Strands(HasForms):
    """The strands of a pass."""

    listed: tuple[Strand, ...]

    def windows(self, taps: int, device: torch.device) -> Windows:
        """The windows of a convolution over `taps` tokens. Layers of one kind share them."""
        return self.form(_windows, taps, device)


def _windows(strands: Strands, taps: int, device: torch.device) -> Windows:
    return WindowPlanner(strands.listed, taps).plan(device)
