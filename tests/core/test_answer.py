"""Stop strings: what is held back because it may begin one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soothsay import SamplingParams
from soothsay.core.answer import AnswerText

FEW_LETTERS = st.text(alphabet="ab", max_size=12)


@given(FEW_LETTERS, FEW_LETTERS.filter(bool))
def test_held_text_is_the_longest_end_that_a_stop_string_begins_with(held: str, stop: str) -> None:
    answer = AnswerText(None, [], SamplingParams(stop=[stop]))
    answer._held = held
    fitting = [n for n in range(len(stop)) if held.endswith(stop[:n])]
    assert answer._overlap(stop) == max(fitting)


def test_the_cost_of_a_token_does_not_grow_with_the_stop_string() -> None:
    class Counting(str):
        __slots__ = ("calls",)

        def find(self, *place: object) -> int:  # type: ignore[override]
            self.calls = getattr(self, "calls", 0) + 1
            return super().find(*place)  # type: ignore[arg-type]

        def endswith(self, *end: object) -> bool:  # type: ignore[override]
            self.calls = getattr(self, "calls", 0) + 1
            return super().endswith(*end)  # type: ignore[arg-type]

    answer = AnswerText(None, [], SamplingParams())
    answer._held = held = Counting("abc")
    assert answer._overlap("c" + "x" * 10_000) == 1
    assert held.calls <= 3
