"""The windows of convolutions, against the tokens that they should cover."""

from __future__ import annotations

import pytest
import torch

from soothsay.core.strands import WITHIN, Strand, Strands, Windows

Line = list[object]
TAPS = 3
BEFORE = TAPS - 1


def line_of(strands: list[Strand], found: Windows) -> Line:
    """What stands at each place: zeros, inputs of states, nodes in journals, and rows."""
    states = [("state", int(slot), i) for slot in found.slots for i in range(BEFORE)]
    kept = [("node", int(slot), int(node)) for slot, node in zip(*found.kept, strict=True)]
    return ["zero", *states, *kept, *(("row", i) for i in range(strands[-1].end))]


def covered(s: Strand) -> tuple[dict[int, Line], dict[int, Line], dict[tuple[int, int], int]]:
    """The tokens below each row's window, those of the states that slots get, and rows noted in journals."""
    fresh = s.is_new or s.slot == WITHIN
    start: Line = ["zero"] * BEFORE if fresh else [("state", s.slot, i) for i in range(BEFORE)]
    path: dict[int, Line] = {-1: [*start, *(("row", s.first + i) for i in range(s.advancing))]}
    rows = {s.first + i: path[-1][: i + 1 + BEFORE][-TAPS:] for i in range(s.advancing)}
    ends = {slot: path[-1][: count + BEFORE][-BEFORE:] for count, slot in s.marks}
    if s.slot != WITHIN and s.advancing:
        ends[s.slot] = path[-1][-BEFORE:]
    noted = {}
    for node, parent in enumerate(s.parents):
        row = s.first + s.advancing + node - s.first_node
        own = ("node", s.slot, node) if node < s.first_node else ("row", row)
        path[node] = [*path[parent], own]
        if node >= s.first_node:
            rows[row] = path[node][-TAPS:]
            if s.slot != WITHIN:
                noted[s.slot, node] = row
    return rows, ends, noted


CASES = {
    "the example of the module": [Strand(0, 2, 0, (-1, 0), 0)],
    "within the pass": [Strand(0, 3, 0, (-1, 0, 0)), Strand(6, 1, 0, ())],
    "trees of two requests, level by level": [
        Strand(0, 0, 2, (-1, 0, 0, 1), 1, is_new=False),
        Strand(2, 4, 0, (-1, 0, 1), 0, is_new=False, marks=((1, 5), (4, 6))),
        Strand(9, 0, 3, (-1, 0, 0, 2, 2), 2, is_new=False),
    ],
    "a tree of a new request": [Strand(0, 0, 0, (-1, 0, 1, 0), 3), Strand(4, 1, 0, (), 1, marks=((1, 7),))],
}


@pytest.mark.parametrize("name", CASES)
def test_windows_cover_a_token_and_those_before_it(name: str) -> None:
    strands = CASES[name]
    found = Strands(tuple(strands)).windows(TAPS, torch.device("cpu"))
    line = line_of(strands, found)
    rows, ends, noted = dict[int, Line](), dict[int, Line](), dict[tuple[int, int], int]()
    for strand in strands:
        own = covered(strand)
        rows, ends, noted = rows | own[0], ends | own[1], noted | own[2]
    assert [[line[place] for place in window] for window in found.rows.tolist()] == [
        rows[row] for row in range(strands[-1].end)
    ]
    slots, places = found.end_slots.tolist(), found.ends.tolist()
    assert {slot: [line[p] for p in own] for slot, own in zip(slots, places, strict=True)} == ends
    keys = [tuple(key) for key in torch.stack(found.noted, dim=1).tolist()]
    assert dict(zip(keys, found.noted_rows.tolist(), strict=True)) == noted


def test_layers_share_the_windows_of_a_pass() -> None:
    strands, cpu = Strands(tuple(CASES["within the pass"])), torch.device("cpu")
    assert strands.windows(TAPS, cpu) is strands.windows(TAPS, cpu)
    assert strands.windows(2, cpu).rows.shape[1] == 2
