"""The controller in a simulated world with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scripted import FLAT, STEEP, TARGET, Scripted, World, future, run

from soothsay import LLM, SamplingParams
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import EVERYBODY
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict
from soothsay.drafters.base import Drafter, NoDrafter, ReadingDrafter, SignalingDrafter, Target
from soothsay.drafters.control import controller
from soothsay.drafters.control.controller import NOBODY, Controller
from soothsay.drafters.control.forecast import ProbeSchedule
from soothsay.drafters.control.request_state import MAX_BACKLOG
from soothsay.drafters.heads.mtp import MTP
from soothsay.drafters.lookup.suffix_matching import Suffix
from soothsay.model.timing.pass_times import PassTimes


def rates(
    times: PassTimes, count: int, parts: Callable[[World], list[Scripted]], steps: int = 400
) -> tuple[float, list[float], float]:
    """Tokens per second of plain decoding, of each drafter alone, and of the controller over all drafters."""
    plain, _ = run(World(times), NoDrafter(TARGET), count, steps // 8)
    alone = [
        run(world := World(times), parts(world)[i], count, steps)[0] for i in range(len(parts(World(times))))
    ]
    world = World(times)
    auto = Controller(TARGET, parts(world), times, world.clock)
    return plain, alone, run(world, auto, count, steps)[0]


COUNTS = (1, 4, 16, 32)
CHANCES = ((0.0, 0.0), (0.1, 0.6), (0.5, 0.8), (0.9, 0.3), (0.02, 0.9))
COSTS = ((0.01, 0.1), (0.05, 0.6))
TIMES = {"flat": FLAT, "steep": STEEP}


def worlds() -> list[Any]:
    """All combinations. A quarter, which has every pair of values, is quick."""
    made = []
    for i, j, k, m in product(*(range(len(values)) for values in (COUNTS, CHANCES, COSTS, TIMES))):
        is_quick = (m, k) == ((i + j) % 2, (i // 2 + j) % 2)
        name, times = [*TIMES.items()][m]
        case = (COUNTS[i], times, CHANCES[j], COSTS[k])
        label = f"{COUNTS[i]}-{name}-{CHANCES[j]}-{COSTS[k]}"
        made.append(pytest.param(*case, id=label, marks=() if is_quick else pytest.mark.slow))
    return made


@pytest.mark.parametrize(("count", "times", "chances", "costs"), worlds())
def test_never_much_slower_than_plain_or_than_the_best_drafter(
    count: int, times: PassTimes, chances: tuple[float, float], costs: tuple[float, float]
) -> None:
    def parts(world: World) -> list[Scripted]:
        unit = times(1)
        return [
            Scripted(world, lambda _, c=c: c, cost * unit) for c, cost in zip(chances, costs, strict=True)
        ]

    plain, alone, auto = rates(times, count, parts)
    assert auto > 0.97 * plain
    assert auto > 0.95 * max(alone)


@pytest.mark.parametrize(("second", "steps"), [(1.0, 20), (0.0005, 3000)])
def test_the_times_of_passes_are_followed(second: float, steps: int) -> None:
    """Each long pass is compared. Short passes are compared once in `FOLLOW_INTERVAL`."""
    curve = [[1.0 * second, 1.1 * second]]
    world = World(PassTimes([1, 16], [0], curve))
    auto = Controller(TARGET, [NoDrafter(TARGET)], PassTimes([1, 16], [0], curve), world.clock)
    run(world, auto, 1, steps)
    world.times = PassTimes([1, 16], [0], [[2 * second, 2.2 * second]])
    run(world, auto, 1, steps)
    assert auto.times(1) == pytest.approx(2 * second, rel=0.05)


def test_a_pass_with_a_chunk_of_a_prompt_says_nothing_about_smaller_passes() -> None:
    """A chunk's rows are not among those that the controller counts."""
    world = World(FLAT)
    auto = Controller(TARGET, [NoDrafter(TARGET)], deepcopy(FLAT), world.clock)
    (_, (request,)), before = run(world, auto, 1, 5), auto.times(1)
    for _ in range(20):
        auto.propose([request])
        world.now += 100 * before
        said = [Observation(request, 2, 1, (), DraftTree(0), None, Verdict([], [7]))]
        auto.observe([*said, Observation(request, 0, 512, ())])
    assert auto.times(1) == before


def test_trees_grow_where_rows_share_experts() -> None:
    """Two models whose layers have 64 experts, 4 for each row. Only the experts that run take time."""
    rows = [1, 2, 4, 8, 16, 32, 1024]
    experts = [64 * (1 - (1 - 4 / 64) ** n) for n in rows]

    def times(each: float) -> PassTimes:
        made = PassTimes(rows, [0], [[1 + 0.25 * count for count in experts]], experts)
        assert made.experts is not None
        made.experts.each = each
        return made

    def mean_rows(each: float) -> float:
        world, seen = World(times(each)), []

        class Mixture:
            @property
            def experts_run(self) -> float:
                seen.append(world.rows)
                return float(np.interp(1 + (world.rows - 1) * each, rows, experts))

        target = replace(TARGET, model=Mixture())  # type: ignore[arg-type]
        part = Scripted(world, lambda _: 0.75, cost=0.01, depth=12)
        run(world, Controller(target, [part], times(1.0), world.clock), 1, 400)
        return float(np.mean(seen[100:]))

    distinct, shared = mean_rows(1.0), mean_rows(0.1)
    assert distinct < 0.6 * shared


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    world, chance = World(FLAT), [0.0]
    part = Scripted(world, lambda _: chance[0], cost=2.0)
    auto = Controller(TARGET, [part], FLAT, world.clock)
    run(world, auto, 1, 300)
    bad = part.calls
    assert bad < 60
    chance[0] = 0.9
    run(world, auto, 1, 600)  # another request, to which all that was learnt applies
    assert part.calls - bad > 300


def test_requests_are_told_apart() -> None:
    """The drafter is right for half of the requests. Only they verify its nodes."""
    world = World(FLAT)
    part = Scripted(world, lambda request: 0.9 if request.seed % 2 else 0.0, cost=0.1)
    nodes: dict[int, int] = {}

    class Watched(Controller):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            trees = super().propose(requests)
            for request, tree in zip(requests, trees, strict=True):
                nodes[request.seed] = nodes.get(request.seed, 0) + len(tree) - 1
            return trees

    run(world, Watched(TARGET, [part], FLAT, world.clock), 4, 400)
    assert min(nodes[1], nodes[3]) > 4 * max(nodes[0], nodes[2])


class Knowing(Scripted, SignalingDrafter):
    """Is right at one position in eight, and signals there."""

    tells = True
    look = 0.0  # what saying so costs
    looks = places = 0

    def knows(self, request: Request) -> bool:
        return (len(request.tokens) * 2_654_435_761 >> 9) % 8 == 0

    def signal(self, request: Request) -> int:
        self.looks += 1
        self.places += self.knows(request)
        self.world.now += self.look
        return 1 + int(self.tells and self.knows(request))


@pytest.mark.parametrize("count", [1, 4])
def test_a_drafter_that_says_when_it_knows_something_is_asked_then(count: int) -> None:
    rate, asked = {}, {}
    for tells in (False, True):
        world = World(FLAT)
        part = Knowing(world, lambda request: 0.95 * part.knows(request), cost=4.0)  # noqa: B023
        part.tells = tells
        auto = Controller(TARGET, [part], FLAT, world.clock)
        rate[tells], _ = run(world, auto, count, 1200)
        asked[tells] = part.asked / part.places
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    assert rate[False] > 0.97 * plain
    assert rate[True] > 1.388 * plain
    assert rate[True] > 1.15 * rate[False]  # which learns by scores alone, and gains 19% for four requests
    assert 0.9 < asked[True] < 1.3
    of = {signal: auto.shared_forecasts[EVERYBODY][0, signal, False] for signal in (1, 2)}
    assert of[1].calibration.probability(-0.2) < 0.5
    assert of[2].calibration.probability(-0.2) > 0.9


def test_a_drafter_that_says_that_it_knows_nothing_is_not_asked() -> None:
    asked: list[bool] = []

    class Silent(Knowing):
        def signal(self, request: Request) -> int:
            return int(self.knows(request))

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            asked.extend(map(self.knows, requests))
            return super().propose(requests)

    world = World(FLAT)
    part = Silent(world, lambda _: 0.95, cost=4.0)
    run(world, Controller(TARGET, [part], FLAT, world.clock), 1, 1200)
    assert len(asked) > 40
    assert all(asked)


@pytest.mark.parametrize("count", [1, 4])
def test_signals_that_take_long_are_seldom_looked_at_where_nothing_pays(count: int) -> None:
    world = World(FLAT)
    part = Knowing(world, lambda _: 0.0, cost=1.0)
    part.look = 0.5
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    rate, _ = run(world, Controller(TARGET, [part], FLAT, world.clock), count, 6000)
    assert rate > 0.97 * plain
    assert 6000 * count / 80 < part.looks < 6000 * count / 4


@pytest.mark.parametrize("count", [1, 4])
def test_signals_that_take_long_are_always_looked_at_where_they_pay(count: int) -> None:
    world = World(FLAT)
    part = Knowing(world, lambda request: 0.95 * part.knows(request), cost=4.0)
    part.look = 0.5 / count
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    rate, _ = run(world, Controller(TARGET, [part], FLAT, world.clock), count, 1200)
    assert rate > 1.1 * plain
    assert part.looks > 1150 * count
    assert part.asked > 0.9 * part.places


def test_the_first_look_which_reads_the_prompt_does_not_count() -> None:
    class Slow(Knowing):
        def signal(self, request: Request) -> int:
            self.look = 0.0 if self.looks else 500.0
            return super().signal(request)

    world = World(FLAT)
    part = Slow(world, lambda request: 0.95 * part.knows(request), cost=4.0)
    auto = Controller(TARGET, [part], FLAT, world.clock)
    run(world, auto, 1, 20)
    assert part.looks > 10
    assert auto.costs.polling(1) == 0


def test_signals_are_read_after_the_first_token(sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    signal, answered = Suffix.signal, []

    def watched(self: Suffix, request: Request) -> int:
        answered.append(len(request.tokens) - request.num_prompt)
        return signal(self, request)

    monkeypatch.setattr(Suffix, "signal", watched)
    sibyl.generate(
        "One, two", SamplingParams(max_tokens=8, ignore_eos=True), drafter="suffix | prompt-lookup"
    )
    assert min(answered) == 1


def test_more_requests_turn_speculation_off_and_fewer_on_again() -> None:
    times = PassTimes([1, 8, 1024], [0], [[10.0, 10.5, 1300.0]])
    world = World(times)
    part = Scripted(world, lambda _: 0.6, cost=0.5)
    auto = Controller(TARGET, [part], times, world.clock)
    asked = []
    for count in (1, 32, 1):
        before = part.calls
        run(world, auto, count, 200)
        asked.append(part.calls - before)
    assert asked[0] > 150
    assert asked[1] < 40
    assert asked[2] > 150


def test_a_step_in_which_nobody_is_asked_takes_no_time_of_drafters() -> None:
    world = World(STEEP)
    part = Scripted(world, lambda _: 0.5, cost=1.0)
    auto = Controller(TARGET, [part], STEEP, world.clock)
    _, requests = run(world, auto, 1, 200)
    calls = part.calls
    assert calls < 20
    assert auto.states[requests[0]].paused_until > auto.step


def test_guesses_of_several_drafters_are_verified_in_one_tree() -> None:
    """One drafter is right at some positions, the other at all others. Their scores do not show it."""

    class Half(Scripted):
        def _tree(self, request: Request) -> DraftTree:
            tree, here = DraftTree(int(request.tokens[-1])), len(request.tokens)
            right = (here * 2_654_435_761 >> 7) % 2 == self.depth % 2
            tree.add(0, future(request, here) if right else 60_000 + self.depth, -0.5)
            return tree

    def halves(world: World) -> list[Half]:
        return [Half(world, lambda _: 1.0, 0.01, depth) for depth in (2, 3)]

    world = World(FLAT)
    both, _ = run(world, Controller(TARGET, halves(world), FLAT, world.clock), 1, 300)
    for index in range(2):
        world = World(FLAT)
        alone, _ = run(world, halves(world)[index], 1, 300)
        assert both > 1.2 * alone


@pytest.mark.parametrize("are_twins", [True, False])
def test_drafters_that_are_right_at_the_same_places_are_seldom_asked_together(are_twins: bool) -> None:
    class Placed(Scripted):
        """Is right in half of the places, all of its tokens at once. Twins are right in the same ones."""

        def _tree(self, request: Request) -> DraftTree:
            tree, node, here = DraftTree(int(request.tokens[-1])), 0, len(request.tokens)
            right = random.Random(1000 * here + (0 if are_twins else self.depth)).random() < 0.5
            for level in range(4):
                token = future(request, here + level) if right else 60_000 + 10 * self.depth + level
                node = tree.add(node, token, -0.2)
            return tree

    world = World(FLAT)
    cheap, dear = Placed(world, lambda _: 0.5, 0.3, depth=4), Placed(world, lambda _: 0.5, 0.6, depth=5)
    auto = Controller(TARGET, [cheap, dear], FLAT, world.clock)
    _, (request,) = run(world, auto, 1, 600)
    apart = auto.states[request].forecasts[0].shared.apart[1].ratio
    together = cheap.calls + dear.calls - (600 - auto.decisions[NOBODY])
    if are_twins:
        assert apart < 0.3
        assert together < 120
    else:
        assert 0.6 < apart < 1.5
        assert together > 400


class Noted(MTP):
    """Notes its drafts by position, and takes some time for each."""

    def __init__(self, target: Target, world: World, silent: bool = False):
        super().__init__(target, depth=4)  # so few that a controller lets it go on to the end
        self.world, self.silent = world, silent
        self.trees: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.world.now += 0.06 * self.world.times(1)
        for request in requests:  # as many nodes as ever, so that drafts compare
            request.max_nodes = self.max_nodes
        trees = super().propose(requests)
        self.trees.update((len(r.tokens), t.tokens) for r, t in zip(requests, trees, strict=True))
        return [DraftTree(tree.tokens[0]) for tree in trees] if self.silent else trees


class Oracle(Drafter):
    """Knows the answer, and adds wrong draft tokens before it or after it."""

    max_nodes = 7

    def __init__(self, hidden: bool):
        self.hidden = hidden
        self.said: Sequence[int] = ()

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        tree = DraftTree(int(request.tokens[-1]))
        if self.hidden:
            tree.add(0, 0, -0.3)  # as sure as the third right token, so that it is verified
        last = tree.extend(self.said[request.num_output : request.num_output + 4], -0.1)
        if not self.hidden:
            tree.extend([0, 0], -0.1, last)
        return tree


@pytest.mark.parametrize("beside", [None, Oracle(True), Oracle(False)], ids=["alone", "hidden", "straight"])
def test_a_drafter_that_has_paused_knows_what_it_would_know_without(
    beside: Oracle | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses during the first request, and from the start of the second one. It is not given up.

    The decisions must not depend on the text, which differs between processors. So the drafter is cheap, and
    the other drafter's first token is nearly certain: nothing here is close to its price.
    """
    monkeypatch.setattr(controller, "is_hopeless", lambda *_: False)
    llm = LLM("sibyl", dtype="int8", drafter="none", kv_tokens=2048, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    times = deepcopy(FLAT if beside else STEEP)  # following passes changes it
    world = World(times)
    always, paused = Noted(llm.engine.target, world, silent=True), Noted(llm.engine.target, world)

    class Slow(Controller):
        """Each pass takes the simulated time."""

        def observe(self, observations: Sequence[Observation]) -> None:
            world.now += times(self.costs.rows)
            super().observe(observations)

    auto = Slow(llm.engine.target, [beside, paused] if beside else [paused], times, world.clock)
    for number, prompt in enumerate(
        ("The river rises in the hills north of the town. In spring", "At night")
    ):
        always.trees.clear()
        paused.trees.clear()
        expected = llm.generate(prompt, params, drafter=always).token_ids
        if beside:
            beside.said = expected
        result = llm.generate(prompt, params, drafter=auto)
        assert result.token_ids == expected
        assert (result.stats.mean_accepted > 2) is (beside is not None)
        assert len(paused.trees) < 60
        assert len(paused.trees) > (number == 0)
        assert max(paused.trees) > 100 or number == 1
        first = len(result.prompt_token_ids) + 1
        assert (min(paused.trees) == first) is (number == 0)
        for place, tree in paused.trees.items():  # it may have stopped earlier
            assert always.trees[place][: len(tree)] == tree
            assert len(tree) > 3


@pytest.mark.parametrize(("taken", "asked"), [(0.0, range(300, 401)), (9.0, range(60))])
def test_time_that_deciding_takes_counts_too(taken: float, asked: range) -> None:
    """The drafter pays for its own time, but not for a slow decision too."""

    class SlowToName(Scripted):
        """The controller reads the name of each drafter that it has asked, before its decision ends."""

        @property
        def name(self) -> str:  # type: ignore[override]
            self.world.now += taken
            return "slow"

    world = World(FLAT)
    part = SlowToName(world, lambda _: 0.4, cost=0.5)
    run(world, Controller(TARGET, [part], FLAT, world.clock), 1, 400)
    assert part.calls in asked


@pytest.mark.parametrize("limit", [400, 100_000])
def test_what_will_not_be_asked_again_keeps_no_features(limit: int) -> None:
    class Reader(Scripted):
        taps = (0,)
        shown: Sequence[Observation] = ()

        def observe(self, observations: Sequence[Observation]) -> None:
            self.shown = observations if observations[0].verdict is None else ()

    world = World(STEEP)
    part = Reader(world, lambda _: 0.3, cost=5.0)
    auto = Controller(TARGET, [part], STEEP, world.clock)
    _, (request,) = run(world, auto, 1, 300, limit=limit)
    (forecast,) = auto.states[request].forecasts
    assert forecast.probes.retired is (limit == 400)
    auto.backlogs[0].catch_up([request])
    assert bool(part.shown) is (limit == 100_000)
    assert part.calls < 10


def test_a_retired_drafter_is_not_probed_at_any_price() -> None:
    schedule = ProbeSchedule(next_step=64, interval=64)
    schedule.retire()
    schedule.stretch(10, 1e6)
    assert schedule.retired


@pytest.mark.parametrize("prompt", [250, MAX_BACKLOG + 50])
@pytest.mark.parametrize(("chance", "times_read"), [(0.0, range(1, 5)), (0.9, range(80, 81))])
def test_prompts_are_read_again_only_where_it_pays(chance: float, times_read: range, prompt: int) -> None:
    """Four requests at once, twenty times. A probe costs the reading of four prompts."""

    class Reader(Scripted):
        taps = (0,)
        read = 0

        def observe(self, observations: Sequence[Observation]) -> None:
            for seen in observations:
                if seen.tree is None:
                    self.read += seen.num_pending > 200
                    world.now += 0.2 * seen.num_pending

    world = World(FLAT)
    part = Reader(world, lambda _: chance, cost=1.0)
    auto = Controller(TARGET, [part], FLAT, world.clock)
    for i in range(20):
        run(world, auto, 4, 60, range(4 * i, 4 * i + 4), limit=prompt + 450, prompt=prompt)
    assert part.read in times_read


class Reader(Scripted, ReadingDrafter):
    """Reads a token in 0.01 seconds: in `catch_up`, and what is left in a draft."""

    def unread(self, request: Request) -> int:
        return len(request.tokens) - 1 - self.read.get(request, 0)

    def catch_up(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.world.now += 0.01 * self.unread(request)
            self.read[request] = len(request.tokens) - 1

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.catch_up(requests)
        return super().propose(requests)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read: dict[Request, int] = {}


def test_the_price_of_a_draft_has_no_prompt_in_it() -> None:
    world = World(FLAT)
    reader = Reader(world, lambda _: 0.9, cost=1.0)
    controller = Controller(TARGET, [reader], FLAT, world.clock)
    run(world, controller, 1, 40, prompt=1000)
    assert reader.asked > 35
    assert controller.costs.drafting[0](1) == pytest.approx(1.0, rel=0.1)
    assert controller.backlogs[0].reading_seconds(100) == pytest.approx(1.0)
    before, asked = controller.costs.drafting[0](1), reader.asked
    run(world, controller, 1, 1, [1], prompt=1000)
    assert reader.asked == asked + 1
    assert controller.costs.drafting[0](1) == pytest.approx(before, rel=0.02)


def test_a_drafter_that_was_never_measured_is_taken_to_read_as_slowly_as_the_target() -> None:
    world = World(FLAT)
    reader = Reader(world, lambda _: 0.9, cost=1.0)
    controller = Controller(TARGET, [reader], FLAT, world.clock)
    run(world, controller, 1, 20, prompt=20_000)  # they would take as long as 586 passes
    assert reader.asked == 0


@pytest.mark.parametrize(("limit", "is_asked"), [(20_010, False), (100_000, True)])
def test_a_long_prompt_is_read_only_for_an_answer_that_may_be_long(limit: int, is_asked: bool) -> None:
    """Reading 20,000 tokens takes as long as 20 passes."""
    world = World(FLAT)
    reader = Reader(world, lambda _: 0.9, cost=1.0)
    controller = Controller(TARGET, [reader], FLAT, world.clock)
    run(world, controller, 1, 40, prompt=100)
    asked = reader.asked
    run(world, controller, 1, 20, prompt=20_000, limit=limit, seeds=[7])
    assert (reader.asked > asked) is is_asked


def test_decisions_are_counted_by_name_for_each_request() -> None:
    world = World(FLAT)
    good, bad = Scripted(world, lambda _: 0.9, 0.1), Scripted(world, lambda _: 0.0, 0.1)
    good.name, bad.name = "good", "bad"
    auto = Controller(TARGET, [bad, good], FLAT, world.clock)
    assert auto.decisions == {"good": 0, "bad": 0, "none": 0}
    run(world, auto, 3, 100)
    assert auto.decisions == {"good": good.asked, "bad": bad.asked, "none": auto.decisions["none"]}
    assert good.asked > 270
    assert 300 <= sum(auto.decisions.values()) <= 300 + bad.asked

    world = World(STEEP)
    costly = Controller(TARGET, [Scripted(world, lambda _: 0.5, 1.0)], STEEP, world.clock)
    run(world, costly, 1, 200)
    assert costly.decisions["none"] == 200 - costly.decisions["Scripted"] > 180
