"""Features that do not pay are not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from scripted import STEEP, TARGET, Scripted, World, run

from soothsay.core.request import Observation
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.control.decision import FIRST_REST, FeatureRest


class Reader(Scripted):
    """A drafter that reads features, and is shown some at each step."""

    taps = (0,)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Need nothing."""


def serve(world: World, auto: Controller, count: int, steps: int) -> None:
    """Serve requests that end after some steps."""
    _, requests = run(world, auto, count, steps, limit=400)
    for request in requests:
        auto.release(request)


@pytest.mark.parametrize(("cost", "rests"), [(5.0, True), (0.01, False)])
def test_features_of_a_drafter_that_is_far_from_paying_are_not_recorded(cost: float, rests: bool) -> None:
    world = World(STEEP)
    auto = Controller(TARGET, [Reader(world, lambda _: 0.9, cost)], STEEP, world.clock)
    serve(world, auto, 1, 200)
    assert auto.taps == (() if rests else (0,))


def test_they_are_recorded_again_after_a_while_and_for_a_smaller_batch() -> None:
    world = World(STEEP)
    part = Reader(world, lambda _: 0.9, 5.0)
    auto = Controller(TARGET, [part], STEEP, world.clock)
    recorded = []
    for _ in range(60):
        serve(world, auto, 4, 50)
        recorded.append(auto.taps == (0,))
    assert 2 <= sum(before != after for before, after in pairwise(recorded)) <= 12
    assert sum(recorded) < 30
    part.cost = 0.001
    serve(world, auto, 1, 50)
    assert auto.taps == (0,)


def test_a_request_that_began_without_features_never_asks_for_a_draft_of_them() -> None:
    world = World(STEEP)
    part = Reader(world, lambda _: 0.9, 5.0)
    auto = Controller(TARGET, [part], STEEP, world.clock)
    serve(world, auto, 1, 200)
    asked, part.cost = part.asked, 0.001
    serve(world, auto, 1, 40)
    assert part.asked == asked


def test_rests_become_longer() -> None:
    rest = FeatureRest()
    rest.begin(0, 4)
    assert rest.is_over(FIRST_REST, 4)
    assert rest.is_over(1, 2)
    rest.begin(0, 4)
    assert not rest.is_over(FIRST_REST, 4)
