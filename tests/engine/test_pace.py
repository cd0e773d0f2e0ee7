"""How many rows fit in a time."""

from __future__ import annotations

import pytest

from soothsay.engine.pace import MIN_PREFILL_ROWS, Pace


def test_without_a_limit_everything_fits() -> None:
    pace = Pace(None)
    pace.follow(100, 1e9)
    assert pace.rows(512, 3) == 512


def test_before_anything_is_known_everything_fits() -> None:
    assert Pace(0.1).rows(512, 3) == 512


def test_what_fits_follows_from_passes() -> None:
    pace = Pace(0.25)
    pace.follow(512, 1.024)  # 2 ms a row
    assert pace.rows(512, 3) == 125
    assert pace.rows(100, 3) == 100


def test_each_request_has_a_row_beside_those_that_are_read_in_any_case() -> None:
    pace = Pace(0.01)
    pace.follow(512, 512.0)
    assert pace.rows(512, 3) == 3 + MIN_PREFILL_ROWS
    assert pace.rows(512, 200) == 200 + MIN_PREFILL_ROWS
    assert pace.rows(20, 3) == 20


def test_small_passes_say_nothing() -> None:
    pace = Pace(0.25)
    pace.follow(MIN_PREFILL_ROWS - 1, 10.0)
    assert pace.rows(512, 1) == 512
    pace.follow(MIN_PREFILL_ROWS, MIN_PREFILL_ROWS * 0.002)
    assert pace.rows(512, 1) == 125


def test_one_stolen_moment_counts_for_no_more_than_a_doubling() -> None:
    pace = Pace(0.26)
    pace.follow(100, 0.2)
    pace.follow(100, 60.0)
    assert pace.rows(512, 1) == int(0.26 / 0.0026)


@pytest.mark.parametrize("fixed", [0.0, 0.02, 0.1])
def test_chunks_settle_where_a_pass_takes_the_time(fixed: float) -> None:
    """A pass costs something whatever its rows, so that rows cost more in small chunks than in large ones."""
    pace, taken = Pace(0.25), 0.0
    rows = 512
    for _ in range(60):
        taken = fixed + 0.002 * rows
        pace.follow(rows, taken)
        rows = pace.rows(512, 1)
    assert taken == pytest.approx(0.25, rel=0.02)
