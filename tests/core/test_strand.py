"""Which snapshots some tokens of a strand leave."""

from __future__ import annotations

import numpy as np

from soothsay.core.batch import Batch, Rows
from soothsay.core.strands import marked


def test_marks_after_some_tokens_are_those_that_they_reach() -> None:
    marks = ((4, 9), (6, 8), (8, 7), (9, 6))
    assert marked(marks, 4, 4) == ((2, 8), (4, 7)), "the state after 4 tokens was left before"


def test_only_a_request_without_tokens_before_it_begins_with_zeros() -> None:
    """Its slot may hold the state of another request, which has ended."""
    tokens = np.array([5, 6])
    rows = [Rows(tokens, start, state=slot) for slot, start in enumerate((0, 2))]
    assert [strand.is_new for strand in Batch.pack(rows).strands.listed] == [True, False]
