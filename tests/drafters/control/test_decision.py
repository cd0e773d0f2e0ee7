"""The parts of the controller's decision, with the numbers of the worked example in docs/controller.md."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scripted import FLAT, STEEP, TARGET, Scripted, World, run

from soothsay import SamplingParams
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict
from soothsay.drafters.base import LevelwiseDrafter, NoDrafter, SignalingDrafter
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.control.cost import SIZES, CostModel, LevelShare, Prices, RunningCost
from soothsay.drafters.control.decision import AskingPolicy, SignalPolling, select_nodes
from soothsay.drafters.control.forecast import (
    MAX_BACK_OFF,
    NEW_REQUEST_BACK_OFF,
    NOTHING,
    Forecast,
    ProbeSchedule,
    Reliability,
    SharedForecast,
    gains_of,
    shortest_interval,
    start_gains,
)
from soothsay.drafters.control.request_state import Backlog, RatedDraft, RequestState
from soothsay.drafters.trees.own_kv import READ
from soothsay.model.timing.pass_times import PassTimes

PRICES = Prices(
    rate=160.0,
    pass_seconds=[0.0100 + 0.0001 * k for k in range(16)],
    node_prices=[0.016 * k for k in range(16)],
)


def forecast(gains: Sequence[float], reliability: float = 1.0) -> Forecast:
    reliable = Reliability(64.0, expected=2.0, right=2.0 * reliability)
    return Forecast(SharedForecast([0.0, *gains]), [0.0, *gains], ProbeSchedule(), reliable)


def test_the_worked_example_asks_both_drafters() -> None:
    suffix, mtp = forecast([0.30, 0.45, 0.50, 0.52]), forecast([0.70, 1.20, 1.50, 1.65], 1.1)
    of_suffix, of_mtp = suffix.outlook(PRICES), mtp.outlook(PRICES)
    assert (of_suffix.net, of_suffix.best, of_suffix.nodes) == (pytest.approx(0.456), 0.30, 4)
    assert (of_mtp.net, of_mtp.best, of_mtp.nodes) == (pytest.approx(1.751), pytest.approx(0.77), 4)
    assert PRICES.of_seconds(0.002) == pytest.approx(0.32)
    alternative = of_mtp._replace(net=of_mtp.net - PRICES.of_seconds(0.002))
    assert alternative.net == pytest.approx(1.431)
    assert suffix.added_to(alternative, of_suffix, PRICES) == pytest.approx(0.0715)
    assert mtp.added_to(of_suffix, of_mtp, PRICES) == pytest.approx(1.751 - 0.456)


def test_nodes_beside_another_draft_cost_what_rows_cost_after_it() -> None:
    """Four nodes are free, and more would cost a token each. The other draft takes the free ones."""
    prices = Prices(100.0, [0.01] * 5 + [0.02, 0.03, 0.04, 0.05], [0.0] * 5 + [1.0, 2.0, 3.0, 4.0])
    own, other = forecast([0.5, 0.8, 0.9, 1.0]), forecast([0.6, 1.0, 1.2, 1.3])
    of_own, of_other = own.outlook(prices), other.outlook(prices)
    assert of_other.nodes == 4
    assert own.added_to(NOTHING, of_own, prices) == pytest.approx(1.0)
    assert own.added_to(of_other, of_own, prices) == 0.0


def test_the_worked_example_verifies_three_nodes() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2, 3, 4], -0.1)
    request = Request([0], SamplingParams(), seed=0, limit=100, drafter=NoDrafter(TARGET))
    request.max_nodes = 16
    drafts = {request: [RatedDraft(tree, [1.0, 0.9, 0.7, 0.5, 0.01])]}
    assert select_nodes(drafts, PRICES, drafting=0.0022, batch=1)[request].tokens == [0, 1, 2, 3]


@pytest.mark.parametrize(("price", "steps"), [(0.005, 1), (0.032, 4), (0.04, 8), (0.5, 64)])
def test_the_shortest_interval_is_a_power_of_two(price: float, steps: int) -> None:
    assert shortest_interval(price) == steps


def test_probes_that_do_not_pay_back_off() -> None:
    known, step = forecast([0.7, 1.2]), 0
    schedule, shared = known.probes, known.shared
    intervals = []
    for _ in range(8):
        known.record_added(step, 0.0, 1.0, loss=0.032)
        assert schedule.next_step > step
        assert schedule.next_step % schedule.interval == 0
        intervals.append(schedule.interval)
        step = schedule.next_step
    assert intervals == [4, 8, 16, 32, *[4 * MAX_BACK_OFF] * 4]
    assert shared.start_interval == 4 * NEW_REQUEST_BACK_OFF
    new = shared.new_forecast(step + 1).probes
    assert (new.interval, new.next_step) == (shared.start_interval, step + shared.start_interval)
    known.record_added(step, 2.0, 1.0, loss=0.032)
    assert schedule.pays
    assert shared.new_forecast(step).probes.pays


def test_a_drafter_that_nearly_pays_is_asked_again_soon() -> None:
    for added, loss, interval in ((0.9, 0.1, 16), (0.2, 0.8, 128)):
        known = forecast([0.7, 1.2])
        known.record_added(0, added, 1.0, loss)
        assert known.probes.interval == interval


def test_an_outlook_follows_what_was_accepted_and_drafted() -> None:
    known = forecast([0.6])
    before = known.outlook(PRICES).net
    known.record_accepted(2.0, 0)
    between = known.outlook(PRICES).net
    assert between < before
    known.record([0.0, 1.0])
    assert known.outlook(PRICES).net > between


def test_first_gains_change_less_the_more_drafts_they_are_known_from() -> None:
    moved = []
    for drafts in (0, 4, 16):
        shared = SharedForecast([0.0, 0.0], drafts=drafts)
        own = shared.new_forecast(step=0)
        own.record([0.0, 1.0])
        moved.append(own.gains[1])
    assert moved == pytest.approx([2 / 3, 2 / 11, 2 / 35])


def test_no_node_of_a_new_drafter_is_forecast_to_gain_more_than_a_token() -> None:
    for most in (0.5, 3.0, 20.0):
        gains = start_gains(400, most)
        assert gains[0] == 0
        for (size, gain), (larger, more) in pairwise(zip(SIZES, gains, strict=True)):
            assert more - gain <= larger - size + 1e-9
        assert gains[-1] == pytest.approx(most, rel=1e-5)
    assert start_gains(3, 0.0) == [0.0, 0.0, 0.0]


def test_gains_are_known_at_some_sizes() -> None:
    probabilities = [0.5 - 0.01 * node for node in range(9)]
    gains = gains_of(probabilities)
    assert gains[: SIZES.index(8) + 1] == pytest.approx([sum(probabilities[:size]) for size in SIZES[:7]])
    assert gains[SIZES.index(12) :] == [sum(probabilities)] * (len(SIZES) - 7)
    own = forecast([0.0])
    own.gains = gains[:7]
    assert own.outlook(PRICES).nodes == 8
    free = Prices(1.0, [0.01] * 6, [0.0] * 6)
    assert own.outlook(free).nodes == 4  # a request that may have 5 nodes


def test_a_level_has_a_price_of_its_own() -> None:
    class Levelwise(Scripted, LevelwiseDrafter):
        pass

    world = World(FLAT)
    part = Levelwise(world, lambda _: 0.9, cost=0.5)
    controller = Controller(TARGET, [part], FLAT, world.clock)
    run(world, controller, 1, 100)
    prices = controller.costs.prices
    assert prices is not None
    level = controller.costs.level_price(0, 1, prices)
    assert level == pytest.approx(prices.of_seconds(0.5) / part.depth, rel=0.05)
    assert controller.costs.price_per_request(0, prices) == pytest.approx(part.depth * level, rel=0.05)


@pytest.mark.parametrize(
    ("times", "granted"),
    [(PassTimes([1, 3, 4, 1024], [0], [[10.0, 10.1, 20.0, 9999.0]]), range(4, 5)), (FLAT, range(8, 17))],
)
def test_a_drafter_may_propose_few_more_nodes_than_pay(times: PassTimes, granted: range) -> None:
    seen: list[int] = []

    class Levelwise(Scripted, LevelwiseDrafter):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            seen.extend(request.max_nodes for request in requests)
            return super().propose(requests)

    world = World(times)
    part = Levelwise(world, lambda _: 0.95, cost=0.5, depth=8)
    _, requests = run(world, Controller(TARGET, [part], times, world.clock), 1, 100)
    assert len(seen) > 90
    assert all(nodes in granted for nodes in seen[-50:])
    assert requests[0].max_nodes == 16


def test_the_first_time_of_an_activity_does_not_count() -> None:
    """It is much longer than all that follow. A drafter that seemed so slow would not be asked again."""
    cost = RunningCost()
    cost.record(1, 50.0)
    assert cost(1) == 0.0
    cost.record(1, 1.0)
    assert cost(1) == 1.0
    cost.record(1, 2.0)
    assert 1.0 < cost(1) < 1.1


def test_a_cost_is_extrapolated_to_larger_batches_only() -> None:
    cost = RunningCost()
    for _ in range(2):
        cost.record(4, 1.0)
    assert [cost(requests) for requests in (1, 2, 4, 7, 8, 32)] == [1.0, 1.0, 1.0, 1.0, 2.0, 8.0]


def test_a_time_that_was_expected_to_be_long_is_no_outlier() -> None:
    usual, twice = RunningCost(), RunningCost()
    for cost in (usual, twice):
        cost.record(1, 1.0)
        cost.record(1, 1.0)
    usual.record(1, 2.0)
    twice.record(1, 2.0, usual=2.0)
    assert usual(1) == pytest.approx(1.05)
    assert twice(1) == pytest.approx(1.2)


def test_the_rate_begins_anew_with_another_batch_size_or_other_requests_only() -> None:
    costs = CostModel(1, lambda: FLAT, lambda: 0.0)
    first, second, third = (
        Request([0], SamplingParams(), seed=0, limit=9, drafter=NoDrafter(TARGET)) for _ in range(3)
    )
    batches = ([first], [first, second], [second, third], [first], [second])
    told = []
    for batch in batches:
        told.append((costs.set_batch(batch), costs.rate == 0))
        costs.rate = 5.0
    assert told == [(True, True), (True, True), (False, False), (True, True), (False, True)]


def test_the_rate_is_that_of_the_whole_step() -> None:
    now = [0.0]
    costs = CostModel(1, lambda: FLAT, lambda: now[0])
    costs.begin_step()
    for now[0] in (4.0, 10.0):
        costs.end_decision(1)
    verdict = Verdict([], [5, 6, 7, 8, 9])
    costs.end_step([Observation(asking(), 0, 1, (), DraftTree(0), None, verdict)])
    assert costs.rate == 0.5


def test_a_step_earns_what_was_accepted_less_all_that_it_took() -> None:
    """In seconds: a first poll of 7, a decision of 1, a pass of 12 with 15 nodes, and 1 to observe."""
    now = [0.0]
    costs, requests = CostModel(1, lambda: FLAT, lambda: now[0]), [asking(), asking()]
    costs.begin_step()
    now[0] = 7.0
    costs.leave_out(7.0)
    costs.set_batch(requests)
    costs.set_prices(1, requests)
    assert costs.rows == 2
    costs.nodes = 15
    now[0] = 8.0
    costs.end_decision(1)
    now[0] = 20.0
    verdicts = [Verdict([1, 2], [1, 2, 3]), Verdict([], [1])]
    seen = [Observation(own, 0, 1, (), DraftTree(0), None, said)
            for own, said in zip(requests, verdicts, strict=True)]  # fmt: skip
    costs.follow_pass(seen, None)
    now[0] = 21.0
    more = FLAT(17) - FLAT(2)
    assert costs.end_step(seen) == pytest.approx(2 / 2 - (2 + more) / (12 - more))
    assert costs.end_step([replace(one, verdict=None) for one in seen]) == 0  # a prompt's chunks alone


def test_a_level_costs_what_it_adds_to_a_draft() -> None:
    """Each draft takes 0.5 seconds and 0.1 a level. Only one level more or less tells the two apart."""
    share = LevelShare()
    assert share() == 0.0
    share.record(2, 1.0)
    assert share() == pytest.approx(1 / 2)  # all of the time, as far as is known
    for step in range(200):
        levels = 1 + step % 3
        share.record(levels, (0.5 + 0.1 * levels) / 0.7)
    assert share() == pytest.approx(0.1 / 0.7, rel=0.1)
    assert share.usual(4) == pytest.approx(0.9 / 0.7, rel=0.1)
    assert share.usual(1) == pytest.approx(0.6 / 0.7, rel=0.1)
    share.record(2, 50.0)  # the machine was busy elsewhere
    assert share() == pytest.approx(0.1 / 0.7, rel=0.1)


def test_levels_cost_no_more_than_the_whole_draft() -> None:
    share = LevelShare()
    share.record(2, 1.0)
    for step in range(200):
        share.record(1 + step % 3, (0.01, 1.0, 1.8)[step % 3])
    assert share() == 1 / share.levels


def test_a_drafter_with_a_fixed_cost_drafts_deeper() -> None:
    """The price of a level leaves out what a draft costs at any depth."""

    class Levelwise(Scripted, LevelwiseDrafter):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            trees = super().propose(requests)
            levels = 1 + self.calls % self.depth
            self.world.now += 0.1 * levels
            return [tree.prune(1 + levels, levels) for tree in trees]

    world = World(FLAT)
    part = Levelwise(world, lambda _: 0.9, cost=0.5)
    controller = Controller(TARGET, [part], FLAT, world.clock)
    run(world, controller, 1, 200)
    prices = controller.costs.prices
    assert prices is not None
    assert controller.costs.level_price(0, 1, prices) == pytest.approx(prices.of_seconds(0.1), rel=0.15)
    assert controller.costs.price_per_request(0, prices) == pytest.approx(prices.of_seconds(0.75), rel=0.15)


def test_levels_are_grown_for_the_request_that_gains_most() -> None:
    told: list[tuple[float, list[float]]] = []

    class Levelwise(Scripted, LevelwiseDrafter):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            prices = auto.costs.prices
            assert prices is not None
            price = auto.costs.level_price(0, len(requests), prices)
            forecasts = [auto.states[request].forecasts[0] for request in requests]
            told.append((self.min_level_gain, [own.least_claimed(price, prices) for own in forecasts]))
            return super().propose(requests)

    world = World(FLAT)
    part = Levelwise(world, lambda request: 0.9 if request.seed else 0.6, cost=0.5)
    auto = Controller(TARGET, [part], deepcopy(FLAT), world.clock)
    run(world, auto, 2, 40)
    assert all(gain == min(own) for gain, own in told)
    assert any(min(own) < max(own) for _, own in told)


def test_a_level_is_grown_where_it_is_expected_to_pay() -> None:
    honest = forecast([0.7, 1.2])
    # below a node of probability p, the next is right at 0.7 p, and must be worth 0.2 + 0.016 tokens
    assert 0.22 < honest.least_claimed(0.2, PRICES) < 0.216 / 0.7
    doubtful = forecast([0.7, 1.2], reliability=0.5)
    assert doubtful.least_claimed(0.2, PRICES) > 1.5 * honest.least_claimed(0.2, PRICES)
    tree = DraftTree(0)
    tree.extend([1], math.log(0.3))  # scored with 0.3, and never right
    for _ in range(200):
        honest.shared.calibration.record(tree, set())
    assert honest.least_claimed(0.2, PRICES) > 0.35


def asking(limit: int = 100, max_nodes: int = 16) -> Request:
    request = Request([0], SamplingParams(), seed=0, limit=limit, drafter=NoDrafter(TARGET))
    request.max_nodes = max_nodes
    return request


def rated(*tokens: int, probability: float = 0.9) -> RatedDraft:
    tree = DraftTree(0)
    tree.extend([*tokens], -0.1)
    return RatedDraft(tree, [1.0, *(probability,) * len(tokens)])


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        (asking(), [0, 1, 2, 3]),
        (asking(limit=4), [0, 1, 2]),  # the bonus is the last token that it may have
        (asking(max_nodes=2), [0, 1]),
        (asking(limit=2), None),
    ],
)
def test_nodes_are_within_the_limits_of_their_request(request_: Request, chosen: list[int] | None) -> None:
    other = asking()
    drafts = {request_: [rated(1, 2, 3)], other: [rated(7)]}
    selected = select_nodes(drafts, PRICES, drafting=0.0, batch=2)
    assert selected[other].tokens == [0, 7]
    assert (selected[request_].tokens if request_ in selected else None) == chosen


def test_the_best_nodes_of_all_requests_come_first() -> None:
    doubtful, sure = asking(), asking()
    dear = Prices(1.0, [1.0 + 0.3 * k for k in range(16)], [0.3 * k for k in range(16)])
    drafts = {doubtful: [rated(1, 2, 3, probability=0.3)], sure: [rated(7)]}
    selected = select_nodes(drafts, dear, drafting=0.0, batch=2)
    assert {request: tree.tokens for request, tree in selected.items()} == {sure: [0, 7]}


def test_a_node_is_right_once_at_most() -> None:
    """One request had twice as many right drafts as each of the others."""
    state = RequestState(asking(), [0], [forecast([0.5, 0.9], reliability=2.0)])
    tree = DraftTree(0)
    tree.extend([1, 2, 3], -0.4)
    draft, _ = state.rate_draft(0, tree, PRICES)
    assert draft.probabilities[:3] == [1.0, 1.0, pytest.approx(0.9, abs=0.1)]


@pytest.mark.parametrize("first", [0.01, 0.9])
def test_a_node_of_two_drafts_has_the_higher_probability(first: float) -> None:
    request = asking()
    drafts = [rated(1, probability=first), rated(1, probability=0.91 - first), rated(5, probability=0.01)]
    selected = select_nodes({request: drafts}, PRICES, drafting=0.0, batch=1)
    assert selected[request].tokens == [0, 1]


def test_prices_stay_while_the_situation_does() -> None:
    costs, request = CostModel(1, lambda: FLAT, lambda: 0.0), asking(limit=300)
    costs.set_batch([request])
    prices = costs.set_prices(1, [request])
    assert costs.set_prices(2, [request]) is prices
    for change in (
        lambda: request.emit([1] * 70),
        lambda: setattr(request, "max_nodes", 9),
        lambda: setattr(costs, "rows", 9),
    ):
        change()
        changed = costs.set_prices(2, [request])
        assert changed is not prices
        prices = changed
    assert costs.set_prices(17, [request]) is not prices


def test_only_a_probe_that_does_not_pay_doubles_the_interval() -> None:
    """A draft between two probes was asked for because it was expected to pay."""
    schedule = ProbeSchedule(next_step=8, interval=8)
    schedule.record(3, pays=False, loss=0.032)
    assert (schedule.interval, schedule.next_step) == (8, 8)
    schedule.record(8, pays=False, loss=0.032)
    assert (schedule.interval, schedule.next_step) == (16, 16)


def test_signals_change_forecasts_but_not_a_drafter_that_has_retired() -> None:
    first, second, retired = forecast([0.5]), forecast([0.6]), forecast([0.7])
    first.probes, second.probes = ProbeSchedule(32, 32), ProbeSchedule(8, 8)
    retired.probes.retire()
    state = RequestState(asking(), [0, 0], [first, retired])
    state.pause_until_next_probe()
    assert (state.paused_until, state.is_active(31), state.is_active(32)) == (32, False, True)
    state.switch_signals([1, 1], lambda *_: second)
    assert state.forecasts == [second, retired]
    assert state.paused_until == 8
    state.switch_signals([0, 0], lambda *_: retired)
    assert state.forecasts[0] is first, "what was known of this signal"


def test_drafts_of_two_steps_say_nothing_of_each_other() -> None:
    request = asking()
    forecasts = [
        Forecast(SharedForecast([0.0] * 3, drafter), [0.0] * 3, ProbeSchedule()) for drafter in (0, 1)
    ]
    state = RequestState(request, [0, 0], forecasts)
    # the first one is still open when the second one is made
    for drafter, tokens, chosen in ((0, [1, 2, 3], 1), (1, [2, 9], 2)):
        tree = DraftTree(0)
        tree.extend(tokens)
        state.rate_draft(drafter, tree, PRICES)
        request.emit([chosen])
    assert len(state.open_drafts) == 2
    request.emit([3, 4])
    state.check_drafts()
    assert not state.open_drafts
    assert [own.shared.apart for own in forecasts] == [{}, {}]


def test_a_backlog_has_the_features_of_committed_tokens_only() -> None:
    """The second of two children is right, then a chain up to its first node, then the child of a child."""
    read: list[tuple[int, int, list[float]]] = []

    class Reader(Scripted):
        taps = (0,)

        def observe(self, observations: Sequence[Observation]) -> None:
            read.extend((seen.start, seen.num_pending, seen.taps[0][:, 0].tolist()) for seen in observations)

    world, request = World(FLAT), asking()
    backlog = Backlog(Reader(world, lambda _: 0.0, cost=0.0), slice(1, 2), world.clock, lambda: 0.0)
    wide, chain, fork = DraftTree(0), DraftTree(0), DraftTree(0)
    wide.extend([1])
    wide.extend([2])
    chain.extend([3, 4])
    for tokens in ([1], [2], [1, 6]):
        fork.extend(tokens)
    for start, tree, path in ((0, wide, [2]), (2, chain, [1]), (4, fork, [1, 3])):
        rows = torch.arange(float(len(tree)))[:, None] + 10 * start
        backlog.add([Observation(request, start, 1, (rows + 500, rows), tree, None, Verdict(path, [2, 5]))])
    backlog.catch_up([request])
    backlog.catch_up([request])
    assert read == [(0, 7, [0.0, 2.0, 20.0, 21.0, 40.0, 41.0, 43.0])]
    backlog.add([Observation(request, 7, 1, (rows[:1], rows[:1]), DraftTree(0), None, Verdict([], [5]))])
    backlog.drop(request)
    backlog.catch_up([request])
    assert len(read) == 1


def test_only_features_that_are_many_tell_the_time_of_reading() -> None:
    """A drafter reads fewer in the pass of its draft."""

    class Reader(Scripted):
        taps = (0,)

        def observe(self, observations: Sequence[Observation]) -> None:
            self.world.now += 2.0

    world, request = World(FLAT), asking()
    backlog = Backlog(Reader(world, lambda _: 0.0, cost=0.0), slice(0, 1), world.clock, lambda: 0.0)
    for tokens, seconds in ((1, 0.0), (READ, 2 / READ), (1, 2 / READ), (2 * READ, 1.8 / READ)):
        backlog.add([Observation(request, 0, tokens, (torch.zeros(tokens, 1),))])
        backlog.catch_up([request])
        assert backlog.reading_seconds(1) == pytest.approx(seconds)


def test_what_a_request_has_taught_stays_and_the_rest_of_it_goes() -> None:
    class Reader(Scripted):
        taps = (0,)

    world = World(STEEP)
    part = Reader(world, lambda _: 1.0, cost=5.0)
    auto = Controller(TARGET, [part], deepcopy(STEEP), world.clock)
    _, (request,) = run(world, auto, 1, 1)
    shared = auto.shared_forecasts[EVERYBODY][0, 0, False]
    assert shared.drafts == 1
    before = shared.calibration.probability(-0.2)
    taps = (torch.zeros(1, 1),)
    auto.observe([Observation(request, len(request.tokens) - 1, 1, taps)])  # the drafter was not asked
    auto.release(request)
    assert shared.calibration.probability(-0.2) > before, "its last draft was right"
    assert not auto.states
    gone = weakref.ref(request)
    del request
    run(world, auto, 1, 1, seeds=[7])
    gc.collect()
    assert gone() is None


def test_tenants_and_sampled_requests_have_forecasts_of_their_own() -> None:
    world, ann = World(FLAT), Tenant("ann")
    auto = Controller(TARGET, [Scripted(world, lambda _: 0.9, 0.1)], deepcopy(FLAT), world.clock)
    for tenant, temperature in ((EVERYBODY, 0.0), (ann, 1.0)):
        params = SamplingParams(temperature=temperature)
        request = Request([0, 1], params, seed=0, limit=99, drafter=NoDrafter(TARGET), tenant=tenant)
        request.cached, request.max_nodes = 1, 8
        auto.propose([request])
    assert [*auto.shared_forecasts[EVERYBODY]] == [(0, 0, False)]
    assert [*auto.shared_forecasts[ann]] == [(0, 0, True)]


class OneReader:
    """A drafter and its requests. It takes 0.06 tokens to ask for one of them, and 0.2 for two."""

    class Reader(Scripted):
        taps = (0,)

    def __init__(self, *gains: float):
        self.prices = Prices(1.0, [0.01] * 4, [0.0] * 4)
        self.states = [RequestState(asking(), [0], [forecast([gain])]) for gain in gains]
        self.schedules = [state.forecasts[0].probes for state in self.states]
        world = World(FLAT)
        part = self.Reader(world, lambda _: 0.0, cost=0.0)
        self.costs = CostModel(1, lambda: FLAT, world.clock)
        self.costs.batch = len(gains)
        for requests, seconds in ((1, 0.0), (1, 0.06), (2, 0.2)):
            self.costs.drafting[0].record(requests, seconds)
        self.backlog = Backlog(part, slice(0, 1), world.clock, lambda: 0.0)
        self.policy = AskingPolicy([part], self.costs, [self.backlog])

    def asked(self) -> list[int]:
        this = self.policy.begin_round(64, self.states, self.prices)
        return self.policy.requests_to_ask(this, 0, [NOTHING] * len(self.states))


@pytest.mark.parametrize(("gain", "chosen"), [(0.15, [0, 1]), (0.13, [0])])
def test_a_request_beside_a_probe_pays_what_it_adds_to_the_price(gain: float, chosen: list[int]) -> None:
    one = OneReader(0.05, gain)
    one.schedules[0].interval = one.schedules[0].next_step = 64
    one.states[1].forecasts[0].shared.drafts = 1
    assert one.asked() == chosen


def test_a_request_that_does_not_pay_beside_the_others_pauses() -> None:
    one = OneReader(0.15, 0.07)
    for state in one.states:
        state.forecasts[0].shared.drafts = 1
    assert one.asked() == [0]
    assert [schedule.pays for schedule in one.schedules] == [True, False]


@pytest.mark.parametrize(("step", "retired"), [(1000, False), (900, True)])
def test_a_drafter_retires_if_its_next_probe_comes_after_the_end(step: int, retired: bool) -> None:
    one = OneReader(0.01)
    (state,), (schedule,) = one.states, one.schedules
    schedule.interval, schedule.next_step = 16, 1008
    one.policy.retire_drafters(step, state, one.prices)
    assert state.tokens_left == 99
    assert schedule.retired is retired


def test_a_drafter_with_much_to_read_is_probed_less() -> None:
    for tokens, asked in ((0.0, [0]), (1.0, [])):
        one = OneReader(0.05)
        (schedule,) = one.schedules
        schedule.interval = schedule.next_step = 64
        one.backlog.catch_up_seconds = lambda _, taken=tokens: taken  # type: ignore[method-assign]
        assert one.asked() == asked
        assert schedule.interval == (128 if tokens else 64)


@pytest.mark.parametrize(("unread", "retired"), [(0, False), (2000, True)])
def test_a_prompt_that_will_be_unread_counts_before_a_drafter_is_kept(unread: int, retired: bool) -> None:
    one = OneReader(0.01)
    one.backlog.reading_seconds = lambda tokens: tokens / 1000  # type: ignore[method-assign]
    one.schedules[0].interval = one.schedules[0].next_step = 16
    one.policy.retire_drafters(0, one.states[0], one.prices, unread)
    assert one.schedules[0].retired is retired


def test_the_alternative_to_a_drafter_pays_for_the_drafter_that_it_needs() -> None:
    prices = Prices(1.0, [0.01] * 4, [0.0] * 4)
    world = World(FLAT)
    parts = [Scripted(world, lambda _: 0.0, cost=0.0) for _ in range(2)]
    costs = CostModel(2, lambda: FLAT, world.clock)
    for _ in range(2):
        costs.drafting[1].record(1, 0.2)
    backlogs = [Backlog(part, slice(0, 0), world.clock, lambda: 0.0) for part in parts]
    policy = AskingPolicy(parts, costs, backlogs)
    state = RequestState(asking(), [0, 0], [forecast([0.1]), forecast([0.5])])
    this = policy.begin_round(1, [state], prices)
    assert this.order == [0, 1]
    for held, net in ((NOTHING, 0.3), (NOTHING._replace(net=0.4), 0.4)):
        assert policy.alternatives(this, 0, [held])[0].net == pytest.approx(net)
        assert policy.alternatives(this, 1, [held]) == [held]


def test_the_time_of_a_draft_is_that_of_the_requests_asked_for() -> None:
    world = World(FLAT)
    part = Scripted(world, lambda _: 0.9, cost=1.0)
    auto = Controller(TARGET, [part], deepcopy(FLAT), world.clock)
    requests = [asking(), asking(max_nodes=1)]
    for _ in range(3):
        trees = auto.propose(requests)
        world.now += 10.0
        auto.observe(
            [
                Observation(request, len(request.tokens) - 1, 1, (), tree, None, Verdict([], [5]))
                for request, tree in zip(requests, trees, strict=True)
            ]
        )
        for request in requests:
            request.emit([5])
            request.cached = len(request.tokens) - 1
    assert part.asked == 3
    cost = auto.costs.drafting[0]
    assert cost(2) == 2 * cost(1) > 0


def test_a_batch_of_another_size_ends_pauses() -> None:
    world = World(FLAT)
    part = Scripted(world, lambda _: 0.3, cost=50.0)
    auto = Controller(TARGET, [part], deepcopy(FLAT), world.clock)
    _, requests = run(world, auto, 2, 40)
    assert not any(auto.states[request].is_active(auto.step + 2) for request in requests)
    auto.costs.drafting[0] = RunningCost()  # asking would cost nothing now
    asked = part.asked
    auto.propose(requests)
    assert part.asked == asked
    auto.propose(requests[:1])
    assert part.asked == asked + 1


@pytest.mark.parametrize("gain", [0.9, 0.0])
def test_a_signal_that_promises_a_gain_ends_a_pause(gain: float) -> None:
    class Signaling(Scripted, SignalingDrafter):
        def signal(self, request: Request) -> int:
            return 1

    part, costs = Signaling(World(FLAT), lambda _: 0.0, 0.0), CostModel(1, lambda: FLAT, lambda: 0.0)
    known = forecast([gain])
    known.probes = ProbeSchedule(64, 64)
    state = RequestState(asking(), [0], [forecast([0.5])])
    state.was_polled, state.paused_until = True, 64
    costs.set_batch([state.request])
    costs.prices = PRICES
    SignalPolling([part], costs, lambda: 0.0, lambda *_: known).poll(5, [state])
    assert state.signals == [1]
    assert state.is_active(5) is (gain > 0)


class Looking(Scripted, SignalingDrafter):
    """Notes the requests that are polled. Each takes a second."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.polled: list[Request] = []

    def signal(self, request: Request) -> int:
        self.world.now += 1.0
        self.polled.append(request)
        return 1


def test_reading_the_first_signals_is_no_time_of_deciding() -> None:
    world = World(FLAT)
    part, costs = Looking(world, lambda _: 0.0, 0.0), CostModel(1, lambda: FLAT, world.clock)
    polling = SignalPolling([part], costs, world.clock, lambda *_: forecast([0.5]))
    for step in range(1, 4):
        state = RequestState(asking(), [0], [forecast([0.5])])
        costs.begin_step()
        costs.set_batch([state.request])
        polling.poll(step, [state])
        costs.record_proposing(0, 0.0, 0.0)
        costs.end_decision(1)
        assert state.was_polled
    assert costs.deciding(1) == 0


def test_polling_active_requests_says_nothing_about_paused_ones() -> None:
    world = World(FLAT)
    part, costs = Looking(world, lambda _: 0.0, 0.0), CostModel(1, lambda: FLAT, world.clock)
    polling = SignalPolling([part], costs, world.clock, lambda *_: forecast([0.5]))
    active, paused = (RequestState(asking(), [1], [forecast([0.5])]) for _ in range(2))
    active.was_polled = paused.was_polled = True
    paused.paused_until = 1000
    costs.batch, costs.rate = 1, 0.1  # polling takes 0.2 tokens: less than it is taken to bring at first
    for step in range(1, 100):
        polling.poll(step, [active])
    polling.poll(101, [active, paused])
    assert part.polled[-2:] == [active.request, paused.request]
