"""The controller, in a world where time is what the test says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from verifying import match

from soothsay import LLM, SamplingParams
from soothsay.config import EngineConfig
from soothsay.drafters.auto import Auto
from soothsay.drafters.backlog import KEPT
from soothsay.drafters.base import Drafter, NoDrafter, Observation, Target
from soothsay.drafters.mtp import MTP
from soothsay.drafters.outlook import Outlook, Record, unknown_gains
from soothsay.engine.request import Request
from soothsay.engine.timing import StepTimes
from soothsay.engine.tree import DraftTree

TARGET = Target(None, None, EngineConfig(), 0)  # type: ignore[arg-type]

FLAT = StepTimes([1, 16, 32, 1024], [0], [[10.0, 11.0, 12.0, 300.0]])
"""Memory-bound, as large models are at small batches: 16 rows cost little more than one."""

STEEP = StepTimes([1, 2, 1024], [0], [[1.0, 2.0, 1024.0]])
"""Bound by arithmetic: every row costs as much as the first."""


class World:
    """What will be said, and what time it is."""

    def __init__(self, times: StepTimes, seed: int = 0):
        self.times, self.now = times, 0.0
        self.random = random.Random(seed)

    def clock(self) -> float:
        return self.now


def future(request: Request, offset: int) -> int:
    """The token that request will say at a position: anything, but always the same."""
    return (offset * 7919 + request.seed * 104_729) % 50_000


@dataclass
class Scripted(Drafter):
    """Guesses a chain, each token right with a chance that it knows."""

    world: World
    chance: Callable[[Request], float]
    cost: float
    depth: int = 4
    calls: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.max_nodes = 1 + self.depth

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.world.now += self.cost
        self.calls += 1
        self.asked += len(requests)
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        tree, node, here = DraftTree(int(request.tokens[-1])), 0, len(request.tokens)
        for level in range(self.depth):
            right = self.world.random.random() < self.chance(request)
            token = future(request, here + level) if right else 60_000 + level
            node = tree.add(node, token, -0.2)
        return tree


def run(
    world: World,
    drafter: Drafter,
    count: int,
    steps: int,
    seeds: Sequence[int] | None = None,
    limit: int = 100_000,
    prompt: int = 3,
) -> tuple[float, list[Request]]:
    """Tokens a second of `count` requests that go on for so many steps."""
    params = SamplingParams(temperature=0, max_tokens=100_000)
    requests = [
        Request(list(range(prompt)), params, seed=seed, limit=limit, drafter=drafter)
        for seed in (seeds or range(count))
    ]
    for request in requests:
        request.cached = prompt - 1
        request.max_nodes = 16
    features = tuple(torch.zeros(prompt - 1, 1) for _ in drafter.taps)
    if features:
        drafter.observe([Observation(request, 0, prompt - 1, features) for request in requests])
    begin, tokens = world.now, 0
    for _ in range(steps):
        trees = drafter.propose(requests)
        trees = [tree.prune(request.max_nodes, 100) for tree, request in zip(trees, requests, strict=True)]
        context = sum(len(request.tokens) for request in requests) / count
        world.now += world.times(sum(map(len, trees)), context)
        seen = []
        for request, tree in zip(requests, trees, strict=True):
            here = len(request.tokens)
            draws = [
                future(request, here + depth) if right else -1
                for depth, right in zip(tree.depths, _right(tree, request), strict=True)
            ]
            taps = tuple(torch.zeros(len(tree), 1) for _ in drafter.taps)
            seen.append(Observation(request, here - 1, 1, taps, tree, None, match(tree, draws)))
        drafter.observe(seen)
        for observation in seen:
            assert observation.verdict is not None
            observation.request.emit(observation.verdict.tokens)
            observation.request.cached = len(observation.request.tokens) - 1
            tokens += len(observation.verdict.tokens)
    return tokens / (world.now - begin), requests


def _right(tree: DraftTree, request: Request) -> list[bool]:
    here, right = len(request.tokens), [True]
    for node in range(1, len(tree)):
        token = future(request, here + tree.depths[node] - 1)
        right.append(right[tree.parents[node]] and tree.tokens[node] == token)
    return right


def rates(
    times: StepTimes, count: int, parts: Callable[[World], list[Scripted]], steps: int = 400
) -> tuple[float, list[float], float]:
    """Tokens a second: plain, of each drafter by itself, and of the controller over all of them."""
    plain, _ = run(World(times), NoDrafter(TARGET), count, steps // 8)
    alone = [
        run(world := World(times), parts(world)[i], count, steps)[0] for i in range(len(parts(World(times))))
    ]
    world = World(times)
    auto = Auto(TARGET, parts(world), times, world.clock)
    return plain, alone, run(world, auto, count, steps)[0]


@pytest.mark.parametrize("count", [1, 4, 16, 32])
@pytest.mark.parametrize("times", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("chances", [(0.0, 0.0), (0.1, 0.6), (0.5, 0.8), (0.9, 0.3), (0.02, 0.9)])
@pytest.mark.parametrize("costs", [(0.01, 0.1), (0.05, 0.6)])
def test_never_much_slower_than_plain_or_than_the_best_drafter(
    count: int, times: StepTimes, chances: tuple[float, float], costs: tuple[float, float]
) -> None:
    def parts(world: World) -> list[Scripted]:
        unit = times(1)
        return [
            Scripted(world, lambda _, c=c: c, cost * unit) for c, cost in zip(chances, costs, strict=True)
        ]

    plain, alone, auto = rates(times, count, parts)
    assert auto > 0.97 * plain
    assert auto > 0.95 * max(alone)


@pytest.mark.parametrize(("second", "steps"), [(1.0, 20), (0.0005, 1000)])
def test_the_times_of_passes_are_followed(second: float, steps: int) -> None:
    """Long passes one by one; of short ones, as many as go by in the same time."""
    curve = [[1.0 * second, 1.1 * second]]
    world = World(StepTimes([1, 16], [0], curve))
    auto = Auto(TARGET, [NoDrafter(TARGET)], StepTimes([1, 16], [0], curve), world.clock)
    run(world, auto, 1, steps)
    world.times = StepTimes([1, 16], [0], [[2 * second, 2.2 * second]])
    run(world, auto, 1, steps)
    assert auto.times(1) == pytest.approx(2 * second, rel=0.05)


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    world, chance = World(FLAT), [0.0]
    part = Scripted(world, lambda _: chance[0], cost=2.0)
    auto = Auto(TARGET, [part], FLAT, world.clock)
    run(world, auto, 1, 300)
    bad = part.calls
    assert bad < 60
    chance[0] = 0.9
    run(world, auto, 1, 600)  # another request, to which all that was learnt applies
    assert part.calls - bad > 300


def test_requests_are_told_apart() -> None:
    """The drafter is right for half of the requests: these get its nodes."""
    world = World(FLAT)
    part = Scripted(world, lambda request: 0.9 if request.seed % 2 else 0.0, cost=0.1)
    nodes: dict[int, int] = {}

    class Watched(Auto):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            trees = super().propose(requests)
            for request, tree in zip(requests, trees, strict=True):
                nodes[request.seed] = nodes.get(request.seed, 0) + len(tree) - 1
            return trees

    run(world, Watched(TARGET, [part], FLAT, world.clock), 4, 400)
    assert min(nodes[1], nodes[3]) > 4 * max(nodes[0], nodes[2])


class Knowing(Scripted):
    """Is right at one place in eight, and says where."""

    tells = True
    look = 0.0  # what saying so costs
    looks = places = 0

    def knows(self, request: Request) -> bool:
        return (len(request.tokens) * 2_654_435_761 >> 9) % 8 == 0

    def signal(self, request: Request) -> int:
        self.looks += 1
        self.places += self.knows(request)
        self.world.now += self.look
        return int(self.tells and self.knows(request))


@pytest.mark.parametrize("count", [1, 4])
def test_a_drafter_that_says_when_it_knows_something_is_asked_then(count: int) -> None:
    rate, asked = {}, {}
    for tells in (False, True):
        world = World(FLAT)
        part = Knowing(world, lambda request: 0.95 * part.knows(request), cost=4.0)  # noqa: B023
        part.tells = tells
        auto = Auto(TARGET, [part], FLAT, world.clock)
        rate[tells], _ = run(world, auto, count, 1200)
        asked[tells] = part.asked / part.places
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    assert rate[False] > 0.97 * plain
    assert rate[True] > 1.2 * max(plain, rate[False])
    assert 0.9 < asked[True] < 1.3
    of = {signal: auto._records[0, signal, False] for signal in (0, 1)}
    assert of[0].calibration.probability(-0.2) < 0.5
    assert of[1].calibration.probability(-0.2) > 0.9


@pytest.mark.parametrize("count", [1, 4])
def test_signals_that_take_long_are_seldom_looked_at_where_nothing_pays(count: int) -> None:
    world = World(FLAT)
    part = Knowing(world, lambda _: 0.0, cost=1.0)
    part.look = 0.5
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    rate, _ = run(world, Auto(TARGET, [part], FLAT, world.clock), count, 6000)
    assert rate > 0.97 * plain
    assert 6000 * count / 40 < part.looks < 6000 * count / 4


@pytest.mark.parametrize("count", [1, 4])
def test_signals_that_take_long_are_always_looked_at_where_they_pay(count: int) -> None:
    world = World(FLAT)
    part = Knowing(world, lambda request: 0.95 * part.knows(request), cost=4.0)
    part.look = 0.5 / count
    plain = run(World(FLAT), NoDrafter(TARGET), count, 10)[0]
    rate, _ = run(world, Auto(TARGET, [part], FLAT, world.clock), count, 1200)
    assert rate > 1.1 * plain
    assert part.looks > 1150 * count
    assert part.asked > 0.9 * part.places


def test_more_requests_turn_speculation_off_and_fewer_on_again() -> None:
    times = StepTimes([1, 8, 1024], [0], [[10.0, 10.5, 1300.0]])
    world = World(times)
    part = Scripted(world, lambda _: 0.6, cost=0.5)
    auto = Auto(TARGET, [part], times, world.clock)
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
    auto = Auto(TARGET, [part], STEEP, world.clock)
    _, requests = run(world, auto, 1, 200)
    calls = part.calls
    assert calls < 20
    assert auto._states[requests[0]].asleep_until > auto._step


def test_guesses_of_several_drafters_are_verified_in_one_tree() -> None:
    """One is right at some places, the other at all others; neither knows where it is."""

    class Half(Scripted):
        def _tree(self, request: Request) -> DraftTree:
            tree, here = DraftTree(int(request.tokens[-1])), len(request.tokens)
            right = (here * 2_654_435_761 >> 7) % 2 == self.depth % 2
            tree.add(0, future(request, here) if right else 60_000 + self.depth, -0.5)
            return tree

    def halves(world: World) -> list[Half]:
        return [Half(world, lambda _: 1.0, 0.01, depth) for depth in (2, 3)]

    world = World(FLAT)
    both, _ = run(world, Auto(TARGET, halves(world), FLAT, world.clock), 1, 300)
    for index in range(2):
        world = World(FLAT)
        alone, _ = run(world, halves(world)[index], 1, 300)
        assert both > 1.2 * alone


class Noted(MTP):
    """Notes what it would propose, by place, and takes its time."""

    def __init__(self, target: Target, world: World, silent: bool = False):
        super().__init__(target, depth=4)  # so few that a controller lets it go on to the end
        self.world, self.silent = world, silent
        self.trees: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.world.now += 0.12 * self.world.times(1)
        trees = super().propose(requests)
        self.trees.update((len(r.tokens), t.tokens) for r, t in zip(requests, trees, strict=True))
        return [DraftTree(tree.tokens[0]) for tree in trees] if self.silent else trees


class Oracle(Drafter):
    """Knows what will be said, and adds wrong guesses before it or behind it."""

    max_nodes = 7

    def __init__(self, hidden: bool):
        self.hidden = hidden
        self.said: Sequence[int] = ()

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        tree = DraftTree(int(request.tokens[-1]))
        if self.hidden:
            tree.add(0, 0, -0.1)
        last = tree.extend(self.said[request.num_output : request.num_output + 4], -0.1)
        if not self.hidden:
            tree.extend([0, 0], -0.1, last)
        return tree


@pytest.mark.parametrize("beside", [None, Oracle(True), Oracle(False)], ids=["alone", "hidden", "straight"])
def test_a_drafter_that_has_paused_knows_what_it_would_know_without(beside: Oracle | None) -> None:
    """In a first request; and in a second one, in which it pauses from the beginning."""
    llm = LLM("sibyl", dtype="int8", drafter="none", kv_tokens=2048, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    times = FLAT if beside else STEEP
    world = World(times)
    always, paused = Noted(llm.engine.target, world, silent=True), Noted(llm.engine.target, world)

    class Slow(Auto):
        """A pass takes as long as it says, wherever it runs."""

        def observe(self, observations: Sequence[Observation]) -> None:
            world.now += times(self._rows)
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
    """What a drafter brings here is worth its own time, and not that of much thinking besides."""

    class Thinking(Auto):
        def _weigh(self, *args: Any) -> Any:
            world.now += taken
            return super()._weigh(*args)

    world = World(FLAT)
    part = Scripted(world, lambda _: 0.4, cost=0.5)
    run(world, Thinking(TARGET, [part], FLAT, world.clock), 1, 400)
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
    auto = Auto(TARGET, [part], STEEP, world.clock)
    _, (request,) = run(world, auto, 1, 300, limit=limit)
    (outlook,) = auto._states[request].outlooks
    assert outlook.gone is (limit == 400)
    auto._backlogs[0].show([request])
    assert bool(part.shown) is (limit == 100_000)
    assert part.calls < 10


def test_who_has_left_stays_away_at_any_price() -> None:
    outlook = Outlook(Record(unknown_gains(4)), unknown_gains(4), next=64, pause=64)
    outlook.leave()
    outlook.put_off(10, 1e6)
    assert outlook.gone


@pytest.mark.parametrize("prompt", [250, KEPT + 50])
@pytest.mark.parametrize(("chance", "times_read"), [(0.0, range(1, 5)), (0.9, range(80, 81))])
def test_prompts_are_read_again_only_where_it_pays(chance: float, times_read: range, prompt: int) -> None:
    """Four requests at once, twenty times: a try would cost the reading of four prompts."""

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
    auto = Auto(TARGET, [part], FLAT, world.clock)
    for i in range(20):
        run(world, auto, 4, 60, range(4 * i, 4 * i + 4), limit=prompt + 450, prompt=prompt)
    assert part.read in times_read


def test_decisions_are_counted_by_name_for_each_request() -> None:
    world = World(FLAT)
    good, bad = Scripted(world, lambda _: 0.9, 0.1), Scripted(world, lambda _: 0.0, 0.1)
    good.name, bad.name = "good", "bad"
    auto = Auto(TARGET, [bad, good], FLAT, world.clock)
    assert auto.decisions == {"good": 0, "bad": 0, "none": 0}
    run(world, auto, 3, 100)
    assert auto.decisions == {"good": good.asked, "bad": bad.asked, "none": auto.decisions["none"]}
    assert good.asked > 270
    assert 300 <= sum(auto.decisions.values()) <= 300 + bad.asked

    world = World(STEEP)
    costly = Auto(TARGET, [Scripted(world, lambda _: 0.5, 1.0)], STEEP, world.clock)
    run(world, costly, 1, 200)
    assert costly.decisions["none"] == 200 - costly.decisions["Scripted"] > 180
    assert NoDrafter(TARGET).decisions == {}
