"""Which snapshots some tokens of a strand leave."""

from __future__ import annotations

from soothsay.core.strand import marked


def test_marks_after_some_tokens_are_those_that_they_reach() -> None:
    marks = ((4, 9), (6, 8), (8, 7), (9, 6))
    assert marked(marks, 4, 4) == ((2, 8), (4, 7)), "the state after 4 tokens was left before"
