"""The controller: at each step, for each request, which drafters are asked and which nodes are verified.

It maximizes the expected tokens per second of the whole batch. docs/controller.md states the objective, the
models of cost and acceptance, and the decision. Each of its sections is a file of this folder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from soothsay.core.request import Observation, Request
from soothsay.core.tenant import PerTenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, LevelwiseDrafter, SignalingDrafter, Target
from soothsay.drafters.control.compose import Composite
from soothsay.drafters.control.cost import CostModel, Prices
from soothsay.drafters.control.decision import (
    REST_CHECKS,
    AskingPolicy,
    AskingRound,
    FeatureRest,
    Nap,
    SignalPolling,
    is_hopeless,
    select_nodes,
)
from soothsay.drafters.control.forecast import (
    NOTHING,
    Forecast,
    SharedForecast,
    forecast_of_nothing,
    start_gains,
)
from soothsay.drafters.control.request_state import Backlog, RatedDraft, RequestState
from soothsay.model.timing.pass_times import PassTimes

NOBODY = "none"
"""The name in `Controller.decisions` for steps in which no drafter was asked."""

MORE_NODES = 2
"""Nodes that a drafter which grows its tree level by level may propose beyond those that are forecast to be
worth verifying: the root, and one that shows whether more are. Others take time, and are not verified."""


class Controller(Composite):
    """`a | b`: asks the drafters that are expected to pay, and keeps the nodes that are.

    What it learns about the drafters' cost and acceptance stays after `reset`: it is about the drafters, not
    about the texts.

    Args:
        target: the model to draft for.
        parts: the drafters to choose from.
        times: of the target's passes; None: `target.times`.
        clock: returns seconds since an arbitrary moment.

    Attributes:
        decisions: for each drafter's name, in how many steps of requests it was asked; under `NOBODY`, in how
            many no drafter was.
        step: number of steps so far.
        costs: the model of cost.
        states: what is known of each request.
        shared_forecasts: what a tenant's requests have taught of each drafter, by its index, its signal, and
            whether the request samples at a temperature above 0.
        backlogs: features that each drafter has not read yet.
        taps: of all parts; none while features do not pay.
    """

    def __init__(
        self,
        target: Target,
        parts: Sequence[Drafter],
        times: PassTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(target, parts)
        self._clock, self.step = clock, 0
        self.finish_loading()
        if target.times is not None and times is None:
            target.times()  # which may be measured now, and not in a step
        self.states: dict[Request, RequestState] = {}
        self.shared_forecasts: PerTenant[dict[tuple[int, int, bool], SharedForecast]] = PerTenant(dict)
        self.costs = CostModel(len(parts), lambda: times or _times_of(target), clock)
        reading = self.costs.target_reading
        self.backlogs = [Backlog(*own, clock, reading) for own in zip(parts, self._taps, strict=True)]
        self._polling = SignalPolling(parts, self.costs, clock, self._new_forecast)
        self._asking = AskingPolicy(parts, self.costs, self.backlogs)
        self._rest, self._nap = FeatureRest(), Nap()
        self._all_taps, self._readers = self.taps, [i for i, part in enumerate(parts) if part.taps]
        self.decisions: Counter[str] = Counter(dict.fromkeys((*(part.name for part in parts), NOBODY), 0))

    @property
    def _naps(self) -> bool:
        """Whether nothing is done in this step but to keep features."""
        return self.step < self._nap.end

    @property
    def times(self) -> PassTimes:
        """The times of the target's passes."""
        return self.costs.times

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The nodes that are worth verifying for each request; the root alone where none is."""
        self.step += 1
        if not self.costs.serves(requests):
            self._nap = Nap()
        if self._naps:
            self.decisions[NOBODY] += len(requests)
            return [DraftTree(request.last_token) for request in requests]
        self.costs.begin_step()
        can_draft: list[RequestState] = []
        for request in requests:
            state = self.states.get(request) or self._state(request)
            if request.num_pending == 1 and request.max_nodes > 1:
                state.check_drafts()
                can_draft.append(state)
        resized = self.costs.set_batch(requests)
        self._polling.poll(self.step, can_draft)
        active = [state for state in can_draft if resized or state.paused_until <= self.step]
        trees = self._draft(active) if active else {}
        self.decisions[NOBODY] += len(requests) - len(self._trees)
        self.costs.end_decision(len(active))
        return [trees.get(request) or DraftTree(request.last_token) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Time the step, show it to the drafters that were asked, and keep its features for the others."""
        if not self._naps:
            self.costs.follow_pass(observations, self.target.model.experts_run)
        shown = observations if self._trees else ()
        for drafter, part in enumerate(self.parts):
            asked = [seen for seen in shown if self._was_asked(drafter, seen.request)]
            if part.taps and len(asked) < len(observations):
                missed = [seen for seen in observations if self._has_missed(drafter, seen.request)]
                self.backlogs[drafter].add(missed)
            if asked:
                begin = self._clock()
                part.observe([self._seen_by(drafter, seen) for seen in asked])
                self._watch(drafter, asked)
                self.costs.end_drafting(drafter, len(asked), begin, self._levels(drafter, asked))
        if self._naps:
            return
        self._trees.clear()
        self._nap.record(self.step, self.costs.end_step(observations))
        if self._readers and self.step % REST_CHECKS == 0:
            self._rest_or_wake()

    def num_known(self, request: Request, blocks: Sequence[int]) -> int:
        """All of them: drafters pause, so some have read little, and reading it again costs too much."""
        return len(blocks)

    def release(self, request: Request) -> None:
        """Forget a request. What it has taught about the drafters stays."""
        state = self.states.pop(request, None)
        if state is not None:
            state.check_drafts()
        for backlog in self.backlogs:
            backlog.drop(request)
        super().release(request)

    def _state(self, request: Request) -> RequestState:
        """The state of a request, created when the request is new."""
        state = self.states.get(request)
        if state is None:
            signals = [0] * len(self.parts)
            forecasts = [self._new_forecast(request, *own) for own in enumerate(signals)]
            state = self.states[request] = RequestState(request, signals, forecasts)
            if self._readers and not self.taps:
                self._retire_readers(state)
            if self.costs.prices is not None:
                self._asking.retire_drafters(self.step, state, self.costs.prices, request.length)
        return state

    def _new_forecast(self, request: Request, drafter: int, signal: int) -> Forecast:
        """The first forecast of a request for a drafter and a signal."""
        part, sampled = self.parts[drafter], request.params.temperature > 0
        signaling = part if isinstance(part, SignalingDrafter) else None
        if signaling is not None and signal == 0:
            return forecast_of_nothing()
        kind = drafter, signal, sampled
        known = self.shared_forecasts[request.tenant]
        shared = known.get(kind)
        if shared is None:
            size = min(part.max_nodes, self.target.config.max_tree)
            most = part.likely_gain if signaling is None else signaling.first_gain(signal, sampled)
            shared = known[kind] = SharedForecast(start_gains(size, most), drafter)
        return shared.new_forecast(self.step)

    def _draft(self, active: Sequence[RequestState]) -> dict[Request, DraftTree]:
        """Ask drafters, the cheapest first. Returns the nodes to verify."""
        prices = self.costs.set_prices(self.step, [state.request for state in active])
        this = self._asking.begin_round(self.step, active, prices)
        held = [NOTHING] * len(active)  # the best draft of each request so far
        drafts: list[list[RatedDraft]] = [[] for _ in active]
        for place, drafter in enumerate(this.order):
            others = self._asking.alternatives(this, place, held)
            asked = self._asking.requests_to_ask(this, drafter, others)
            if not asked:
                continue
            price, spent, trees = self._ask_for_drafts(this, drafter, asked)
            for index, tree in zip(asked, trees, strict=True):
                draft, outlook = active[index].rate_draft(drafter, tree, prices)
                drafts[index].append(draft)
                forecast, other = active[index].forecasts[drafter], others[index]
                added = forecast.added_to(other, outlook, prices)
                loss = spent - forecast.added_to(other, forecast.outlook(prices), prices)
                forecast.record_added(self.step, added, price, max(loss, 0.0))
                held[index] = held[index].or_better(outlook)
        drafted: dict[Request, list[RatedDraft]] = {}
        for state, own in zip(active, drafts, strict=True):
            self._asking.retire_drafters(self.step, state, prices)
            if own:
                drafted[state.request] = own
            else:
                state.pause_until_next_probe()
        selected = select_nodes(drafted, prices, self.costs.proposing, self.costs.batch)
        for tree in selected.values():
            self.costs.nodes += len(tree) - 1
        return selected

    def _ask_for_drafts(
        self, this: AskingRound, drafter: int, asked: Sequence[int]
    ) -> tuple[float, float, list[DraftTree]]:
        """Let a drafter catch up and propose.

        Returns:
            The usual price per request, the price of this time with catching up, and the trees.
        """
        part, prices = self.parts[drafter], this.prices
        price = this.asking[drafter] / len(asked)
        states = [this.active[index] for index in asked]
        if isinstance(part, LevelwiseDrafter):
            level_price = self.costs.level_price(drafter, len(asked), prices)
            part.min_level_gain = min(
                state.forecasts[drafter].least_claimed(level_price, prices) for state in states
            )
        requests = [state.request for state in states]
        begin = self._clock()
        self.backlogs[drafter].catch_up(requests)
        caught_up = self._clock()
        with _few_nodes(states, drafter, prices) if isinstance(part, LevelwiseDrafter) else nullcontext():
            trees = self._ask(drafter, requests)
        end = self._clock()
        self.costs.record_proposing(drafter, end - caught_up, end - begin)
        self.decisions[part.name] += len(requests)
        return price, price + prices.of_seconds(caught_up - begin) / len(asked), trees

    def _was_asked(self, drafter: int, request: Request) -> bool:
        """Whether a drafter was asked for a request in this step."""
        return drafter in self._trees.get(request, ())

    def _rest_or_wake(self) -> None:
        """Let the engine record no features while they are far from paying for any request."""
        known = [(state, state.forecasts[i]) for state in self.states.values() for i in self._readers]
        if not self.taps:
            if self._rest.is_over(self.step, self.costs.batch):
                self.taps = self._all_taps  # requests that run now lack features, and stay without
        elif known and all(is_hopeless(one.probes, state.tokens_left) for state, one in known):
            self.taps = ()
            self._rest.begin(self.step, self.costs.batch)
            for state in self.states.values():
                self._retire_readers(state)
        elif any(one.drafts and one.probes.pays for _, one in known):
            self._rest = FeatureRest()

    def _retire_readers(self, state: RequestState) -> None:
        """Never ask the drafters that read features for a request."""
        for drafter in self._readers:
            state.forecasts[drafter].probes.retire()
            self.backlogs[drafter].drop(state.request)

    def _levels(self, drafter: int, asked: Sequence[Observation]) -> int:
        """How many levels a drafter has computed in this step, one after the other."""
        if not isinstance(self.parts[drafter], LevelwiseDrafter):
            return 1
        return max(1, *(max(self._trees[seen.request][drafter].depths) for seen in asked))

    def _has_missed(self, drafter: int, request: Request) -> bool:
        """Whether a drafter was not asked for a request, and may be asked later."""
        if self._was_asked(drafter, request):
            return False
        return not self._state(request).forecasts[drafter].probes.retired


def _times_of(target: Target) -> PassTimes:
    if target.times is None:
        raise ValueError("a controller needs the times of the target's passes")
    return target.times()


@contextmanager
def _few_nodes(states: Sequence[RequestState], drafter: int, prices: Prices) -> Iterator[None]:
    """Grant requests `MORE_NODES` beyond what a drafter is forecast to gain by. A probe looks for more."""
    granted = [state.request.max_nodes for state in states]
    for state, nodes in zip(states, granted, strict=True):
        forecast = state.forecasts[drafter]
        if forecast.probes.pays:
            state.request.max_nodes = min(nodes, forecast.outlook(prices).nodes + MORE_NODES)
    try:
        yield
    finally:
        for state, nodes in zip(states, granted, strict=True):
            state.request.max_nodes = nodes
