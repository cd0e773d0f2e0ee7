"""Tables in terminals of every width."""

from __future__ import annotations

import pytest
from conftest import drawn

from soothsay.bench.tables import ResultTable

NUMBERS = ["accepted", "tokens a second", "best nodes", "equal"]
ROWS = [[f"draft-model(depth={i})", "0", *(f"{i}{number}.25" for number in range(4))] for i in (1, 1, 2)]


@pytest.mark.parametrize("width", [34, 40, 60, 80, 200])
def test_columns_without_room_follow_with_the_names(width: int) -> None:
    text = drawn(ResultTable(["drafter", "T", *NUMBERS], ROWS, 2, "A title", "A caption of it all"), width)
    parts = [line for line in text.splitlines() if line.startswith(" drafter")]
    assert (len(parts) > 1) is (width < 60)
    assert text.startswith("A title\n")
    assert text.rstrip().endswith("it all")


def test_a_long_name_has_half_of_the_width() -> None:
    name = "prompt-lookup(min_ngram=2,max_ngram=5)"
    assert name in drawn(ResultTable(["drafter", *NUMBERS], [[name, "1", "2", "3", "4"]]), 80)


def test_names_above_are_left_out_and_groups_have_lines() -> None:
    lines = drawn(ResultTable(["a", "b", "n"], [["x", "1", "5"], ["x", "2", "6"], ["y", "2", "7"]], 2)).split(
        "\n"
    )
    cells = [line.split() for line in lines if line.strip() and "─" not in line]
    assert cells == [["a", "b", "n"], ["x", "1", "5"], ["2", "6"], ["y", "2", "7"]]
    assert lines[lines.index(next(line for line in lines if line.split() == ["2", "6"])) + 1].strip() == ""


def test_markup_in_names_is_text() -> None:
    assert "[bold]" in drawn(ResultTable(["a", "n"], [["[bold]", "1"]]))
