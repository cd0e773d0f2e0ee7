"""Stop strings: what is held back because it may begin one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soothsay import SamplingParams
from soothsay.core.answer import AnswerText

FEW_LETTERS = st.text(alphabet="ab", max_size=12)


@given(FEW_LETTERS, st.lists(FEW_LETTERS.filter(bool), max_size=4))
def test_held_text_is_the_longest_end_that_a_stop_string_begins_with(held: str, stops: list[str]) -> None:
    answer = AnswerText(None, [], SamplingParams(stop=stops))
    answer._held = held
    fitting = [n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])]
    assert answer._first_begun() == len(held) - max(fitting, default=0)


def test_the_cost_of_a_token_does_not_grow_with_the_stop_strings() -> None:
    class Counting(str):
        __slots__ = ("calls",)

        def __getitem__(self, place: object) -> str:  # type: ignore[override]
            self.calls = getattr(self, "calls", 0) + 1
            return super().__getitem__(place)  # type: ignore[index]

    answer = AnswerText(None, [], SamplingParams(stop=[f"c{number:x>10000}" for number in range(500)]))
    answer._held = held = Counting("abc")
    assert answer._first_begun() == 2
    assert held.calls <= 2 * len(held)
