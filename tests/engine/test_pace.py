"""How many rows fit in a time, and whose masks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest

from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.drafters.base import NoDrafter, Target
from soothsay.engine.pace import MAX_DEBT, MIN_PREFILL_ROWS, SLOW_MASK, MaskPace, Pace


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


def requests(*seconds: float) -> list[Request]:
    """Requests whose masks take so long."""
    made = []
    for own in seconds:
        drafter = NoDrafter(Target(None, None, None, 0))  # type: ignore[arg-type]
        request = Request([1], SamplingParams(max_tokens=9), seed=0, limit=10, drafter=drafter)
        request.constraint = SimpleNamespace(seconds=own)  # type: ignore[assignment]
        made.append(request)
    return made


def test_requests_with_cheap_masks_are_never_held_back() -> None:
    pace, running = MaskPace(), requests(0.0, SLOW_MASK / 2, SLOW_MASK)
    for _ in range(5):
        assert pace.select(running) == running
        pace.follow(running, 0.001)


def test_dear_masks_get_half_of_the_time() -> None:
    pace, running = MaskPace(), requests(0.0, 0.3)
    with_masks = 0
    for _ in range(121):
        chosen = pace.select(running)
        assert running[0] in chosen
        with_masks += running[1] in chosen
        pace.follow(chosen, 0.01)
    assert with_masks == 5, "of 0.3 s each, and 29 steps of 0.01 s after each"


def test_many_dear_requests_share_a_step_in_turn() -> None:
    pace, running = MaskPace(), requests(*[0.02] * 16)
    pace.follow(pace.select(running), 0.001)
    counts = Counter[int]()
    for _ in range(16):
        chosen = pace.select(running)
        assert len(chosen) == 2
        counts.update(map(running.index, chosen))
        pace.follow(chosen, 0.001)
    assert set(counts.values()) == {2}


def test_a_dear_request_alone_goes_on_and_owes_little_later() -> None:
    pace, running = MaskPace(), requests(1.0)
    for _ in range(50):
        assert pace.select(running) == running
        pace.follow(running, 0.001)
    both = [*running, *requests(0.0)]
    held_back = 0
    while running[0] not in pace.select(both):
        pace.follow(both[1:], 0.1)
        held_back += 1
    assert held_back <= MAX_DEBT / 0.1 + 1


def test_requests_that_have_gone_leave_the_line() -> None:
    pace, running = MaskPace(), requests(1.0, 0.0)
    pace.follow(running, 0.001)
    gone = weakref.ref(running.pop(0))
    pace.select(running)
    gc.collect()
    assert gone() is None
