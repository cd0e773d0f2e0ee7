"""The tokens that would complete a forbidden sequence, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soothsay.core.bad_sequences import BadSequences

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(TOKENS.filter(bool), max_size=8), TOKENS)
def test_a_token_is_bad_if_a_sequence_ends_with_it(sequences: list[list[int]], said: list[int]) -> None:
    found = BadSequences(map(tuple, sequences))
    assert set(found.after(said)) == {
        words[-1]
        for words in sequences
        if len(words) - 1 <= len(said) and said[len(said) - len(words) + 1 :] == words[:-1]
    }
    assert found.reach == max((len(words) - 1 for words in sequences), default=0)


def test_a_position_costs_one_look_up_a_length() -> None:
    class Counting(list[int]):
        slices = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            self.slices += 1
            return super().__getitem__(place)

    said = Counting([1, 2, 3, 4])
    assert BadSequences((1, 2, 3, 4, token) for token in range(1000)).after(said) == [*range(1000)]
    assert said.slices == 1
