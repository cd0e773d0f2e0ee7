"""Where being awake costs more than it earns, the controller does nothing for a while."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted import FLAT, TARGET, Scripted, World, run

from soothsay.core.request import Observation, Request
from soothsay.drafters.base import NoDrafter, SignalingDrafter
from soothsay.drafters.control.controller import NOBODY, Controller
from soothsay.drafters.control.cost import CostModel
from soothsay.drafters.control.decision import AWAKE_STEPS, FIRST_AWAKE_STEPS, LONGEST_NAP, Nap


class Looking(Scripted, SignalingDrafter):
    """Each look at it takes a part of a pass's ten seconds."""

    look = 0.4
    looks = 0

    def signal(self, request: Request) -> int:
        """Always the same one."""
        self.looks += 1
        self.world.now += self.look
        return 1


class Reader(Scripted):
    """Reads features, and counts the tokens that it was shown."""

    taps = (0,)
    read = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        """Count tokens."""
        for seen in observations:
            self.read += seen.num_pending + (len(seen.verdict.tokens) - 1 if seen.verdict else 0)


def plain(count: int) -> float:
    return run(World(FLAT), NoDrafter(TARGET), count, 50)[0]


def test_naps_are_as_long_as_the_loss_asks() -> None:
    nap, ends = Nap(), []
    for step in range(1, 400):
        if step >= nap.end:
            nap.record(step, -0.03)
            ends.append(nap.end - step - 1)
    naps = [steps for steps in ends if steps > 0]
    assert ends[: FIRST_AWAKE_STEPS - 1] == [-step - 1 for step in range(1, FIRST_AWAKE_STEPS)]
    assert set(naps) == {AWAKE_STEPS * 5}  # 8 of 48 steps lose 3%, which is 0.5% of all
    for earned, steps in ((-0.004, 0), (0.5, 0), (-0.9, LONGEST_NAP)):
        nap = Nap(left=1)
        nap.record(1, earned)
        assert nap.end == 2 + steps


@pytest.mark.parametrize("count", [1, 12])
def test_a_drafter_that_never_pays_is_seldom_looked_at(count: int) -> None:
    world = World(FLAT)
    part = Looking(world, lambda _: 0.0, cost=0.05)
    auto = Controller(TARGET, [part], FLAT, world.clock)
    rate, _ = run(world, auto, count, 4000)
    assert rate > 0.98 * plain(count)
    assert part.looks < 4000 * count / 4
    assert auto.decisions[NOBODY] > 3700 * count


@pytest.mark.parametrize("count", [1, 4])
def test_nobody_sleeps_while_drafts_pay(count: int) -> None:
    world = World(FLAT)
    part = Looking(world, lambda _: 0.6, cost=0.05)
    rate, _ = run(world, Controller(TARGET, [part], FLAT, world.clock), count, 400)
    assert part.looks >= 400 * count
    assert rate > 1.5 * plain(count)


def test_drafts_that_begin_to_pay_are_noticed() -> None:
    world = World(FLAT)
    part = Looking(world, lambda request: 0.9 * (len(request.tokens) > 1000), cost=0.05)
    rate, _ = run(world, Controller(TARGET, [part], FLAT, world.clock), 1, 3000)
    assert rate > 2 * plain(1)


def test_other_requests_end_a_nap() -> None:
    world = World(FLAT)
    part = Looking(world, lambda _: 0.0, cost=0.05)
    auto = Controller(TARGET, [part], FLAT, world.clock)
    run(world, auto, 1, 2000)
    looks = part.looks
    run(world, auto, 1, FIRST_AWAKE_STEPS)  # other requests
    assert part.looks - looks >= FIRST_AWAKE_STEPS - 1
    looks = part.looks
    run(world, auto, 4, FIRST_AWAKE_STEPS)  # and another number of them
    assert part.looks - looks >= 4


def test_features_of_steps_asleep_are_kept() -> None:
    world = World(FLAT)
    parts = [Looking(world, lambda _: 0.0, cost=0.05), Reader(world, lambda _: 0.0, cost=5.0)]
    auto = Controller(TARGET, parts, FLAT, world.clock)
    _, (request,) = run(world, auto, 1, 300, prompt=9)
    assert auto.taps
    assert parts[0].looks < 150
    auto.backlogs[1].catch_up([request])
    assert parts[1].read == len(request.tokens) - 1


def test_a_batch_that_hardly_changes_is_served_still() -> None:
    costs, requests = CostModel(1, lambda: FLAT, lambda: 0.0), run(World(FLAT), NoDrafter(TARGET), 32, 1)[1]
    assert not costs.serves(requests)
    costs.set_batch(requests[:15])
    told = {count: costs.serves(requests[:count]) for count in (7, 8, 16, 29, 30)}
    assert told == {7: False, 8: True, 16: True, 29: True, 30: False}
    assert not costs.serves(requests[15:])  # all are new
