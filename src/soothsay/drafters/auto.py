"""The controller: at each step, for each request, which drafter is asked and how many nodes are verified.

It makes tokens per second as large as it can, over the whole batch. What a pass costs by its rows is measured
once (`soothsay.engine.timing`), what drafters cost is measured as they run, and how often their guesses are
right, by their scores and for each request, is counted: since tokens never depend on who guessed them, every
guess that was ever made can be held against what came, verified or not. Where nothing pays, nothing is asked,
and a step is plain decoding's; now and then a drafter is tried again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from soothsay.drafters.backlog import Backlog
from soothsay.drafters.base import Drafter, Observation, Target
from soothsay.drafters.compose import Composite
from soothsay.drafters.outlook import (
    NOTHING,
    PROBE_SHARE,
    RECENT,
    Cost,
    Market,
    Outlook,
    Record,
    Worth,
    gains_of,
    unknown_gains,
)
from soothsay.drafters.selection import Found, worth_verifying
from soothsay.engine.calibration import settle
from soothsay.engine.request import Request
from soothsay.engine.timing import StepTimes
from soothsay.engine.tree import DraftTree

MARGIN = 0.03
"""Tokens a step that a drafter must be expected to bring beyond its cost, since expectations err."""

FOLLOW = 0.02
"""Seconds from one look at the time of a pass to the next, at least."""

PRICED = 16
"""Steps from one look at prices to the next."""

NEAR = 64
"""Tokens of context within which prices are the same."""

NOBODY = "none"
"""In `Auto.decisions`, where no drafter was asked."""

HORIZON = 64
"""Steps within which what a drafter has to catch up with must have paid."""

SURPLUS = 0.25
"""Tokens that a look at a request that is asleep is taken to bring before any was: enough to look always."""


@dataclass(slots=True)
class _State:
    """A request as the controller sees it."""

    signals: list[int]  # of each drafter, of late
    outlooks: list[Outlook]  # of each drafter, for such guesses as it signals
    others: dict[tuple[int, int], Outlook] = field(default_factory=dict)  # likewise, by drafter and signal
    asked: list[tuple[Outlook, int, DraftTree, float]] = field(default_factory=list)
    """Guesses that are still open: whose, tokens before them, the tree, the sum of its probabilities."""
    asleep_until: int = 0  # nothing is asked before this step, unless the batch changes

    def is_awake(self, step: int) -> bool:
        """Whether drafters are to be considered."""
        return self.asleep_until <= step


_Awake = tuple[Request, _State]


class Auto(Composite):
    """`a | b`: asks whom it pays to ask, and keeps the nodes that it pays to verify.

    Drafters are considered in order of what they cost. One is asked if what it is expected to add to the
    guesses that are there is worth its time; what is expected goes by its signal, if it gives one. The
    guesses of all that were asked are one tree; over all requests of the step, the nodes that are likeliest
    to be right are verified, as many as give most tokens a second. What drafters cost, and how often they are
    right, is known beyond `reset`: it is about them, and not about what was said.

    Args:
        target: the model to draft for.
        parts: the drafters to choose from.
        times: of the target's passes; None: those that `target` has.
        clock: seconds since whenever.
    """

    def __init__(
        self,
        target: Target,
        parts: Sequence[Drafter],
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(target, parts)
        self._states: dict[Request, _State] = {}
        self._times, self._clock = times, clock
        self._step = 0
        self._batch = 0  # requests of the last step
        self._rate = 0.0  # tokens a second of late, with this number of requests
        self._spent = [0.0 for _ in parts]  # seconds of this step's asking
        self._asking = 0.0  # seconds of it, with signals and what drafters had to catch up with
        self._begin = self._end = 0.0  # of `propose`
        self._followed = 0.0  # when the last step began whose time was looked at
        self._costs = [Cost() for _ in parts]
        self._backlogs = [Backlog(*own, clock) for own in zip(parts, self._taps, strict=True)]
        self._deciding = Cost()  # of the controller itself, for each drafter that it asks
        self._looking = Cost()  # of reading signals
        self._found = SURPLUS  # tokens that a look at a request that is asleep brought of late
        # by drafter, signal, and whether requests sample: above temperature 0 guesses are another matter
        self._records: dict[tuple[int, int, bool], Record] = {}
        self._rows = 0  # that this step verifies
        self._market: tuple[tuple[int, ...], Market] | None = None  # of late, and for which steps
        self.decisions: Counter[str] = Counter(dict.fromkeys((*(part.name for part in parts), NOBODY), 0))

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The trees that it pays to verify; roots alone where none does."""
        _ = self.times  # at first they have to be measured, which is no part of deciding
        self._begin, self._asking = self._clock(), 0.0
        if self._begin - self._followed >= FOLLOW:
            self._followed = self._begin
        self._step += 1
        states = [self._open(request) for request in requests]
        changed = len(requests) != self._batch
        if changed:
            self._batch, self._rate = len(requests), 0.0
        self._rows = sum(request.num_pending for request in requests)
        open_ = [
            (request, state)
            for request, state in zip(requests, states, strict=True)
            if request.num_pending == 1 and request.max_nodes > 1
        ]
        for request, state in open_:
            self._learn(request, state)
        self._look(open_)
        awake = [one for one in open_ if changed or one[1].is_awake(self._step)]
        trees = self._choose(awake) if awake else {}
        for request in requests:
            for name in [self.parts[index].name for index in self._trees.get(request, ())] or [NOBODY]:
                self.decisions[name] += 1
        self._end = self._clock()
        if asked := sum(seconds > 0 for seconds in self._spent):
            self._deciding.record(len(awake), (self._end - self._begin - self._asking) / asked)
        return [trees.get(r) or DraftTree(int(r.tokens[-1])) for r in requests]

    def _open(self, request: Request) -> _State:
        state = self._states.get(request)
        if state is None:
            signals = [part.signal(request) for part in self.parts]
            state = _State(signals, [self._outlook(request, *one) for one in enumerate(signals)])
            self._states[request] = state
            if self._market is not None:
                self._let_go(request, state, self._market[1], len(request.tokens))
        return state

    def _outlook(self, request: Request, index: int, signal: int) -> Outlook:
        kind = index, signal, request.params.temperature > 0
        record = self._records.get(kind)
        if record is None:
            size = min(self.parts[index].max_nodes, self.target.config.max_tree)
            record = self._records[kind] = Record(unknown_gains(size))
        return record.outlook(self._step)

    def _look(self, open_: Sequence[_Awake]) -> None:
        """Read what drafters signal: of requests that are awake; of others too, as often as that is cheap, or
        always where it has found enough to ask of late."""
        if not open_:
            return
        price = self._looking(len(open_)) * self._rate / self._batch
        every = 1 if self._found > price else 1 + int(price / PROBE_SHARE)
        looked = open_ if self._step % every == 0 else [one for one in open_ if one[1].is_awake(self._step)]
        begin = self._clock()
        for request, state in looked:
            asleep = not state.is_awake(self._step)
            signals = [part.signal(request) for part in self.parts]
            surplus = self._turn(request, state, signals) if signals != state.signals else 0.0
            if asleep:
                self._found += RECENT / 4 * (surplus - self._found)
        if looked:
            seconds = self._clock() - begin
            self._looking.record(len(looked), seconds)
            self._asking += seconds

    def _turn(self, request: Request, state: _State, signals: list[int]) -> float:
        """Go by what is known of guesses like those that are signalled now; ask at once if that pays.

        Returns by how many tokens it does.
        """
        for index, (before, now) in enumerate(zip(state.signals, signals, strict=True)):
            if before != now and not state.outlooks[index].gone:
                state.others[index, before] = state.outlooks[index]
                known = state.others.get((index, now))
                state.outlooks[index] = known or self._outlook(request, index, now)
        state.signals = signals
        state.asleep_until = min(outlook.next for outlook in state.outlooks)
        if self._market is None:
            return 0.0
        market = self._market[1]
        hopes = [outlook.hope(market).tokens for outlook in state.outlooks]
        surplus = max(hope - self._price(index, market) for index, hope in enumerate(hopes))
        if surplus <= 0:
            return 0.0
        state.asleep_until = self._step
        return surplus

    def _choose(self, awake: Sequence[_Awake]) -> dict[Request, DraftTree]:
        """Ask drafters, the cheapest first, then keep what pays."""
        market = self._prices(awake)
        costs = [self._cost(index, len(awake)) for index in range(len(self.parts))]
        here = [i for i in range(len(costs)) if any(not state.outlooks[i].gone for _, state in awake)]
        order = sorted(here, key=lambda index: costs[index])
        there = [NOTHING] * len(awake)  # what each request has already
        found: list[list[Found]] = [[] for _ in awake]
        for place, index in enumerate(order):
            later = [(other, market.call(costs[other]) / len(awake)) for other in order[place + 1 :]]
            without = [
                max(has, *(state.outlooks[other].hope(market).less(price) for other, price in later), NOTHING)
                for (_, state), has in zip(awake, there, strict=True)
            ]
            asked = self._worth_asking(index, awake, without, market)
            if not asked:
                continue
            price = market.call(costs[index]) / len(asked)
            levels = max(awake[number][1].outlooks[index].record.levels for number in asked)
            self.parts[index].least = price / levels
            trees, late = self._propose_by(index, [awake[number] for number in asked])
            spent = price + market.call(late) / len(asked)
            for number, tree in zip(asked, trees, strict=True):
                request, state = awake[number]
                guess, worth = self._weigh(request, state, state.outlooks[index], tree, market)
                found[number].append(guess)
                surplus = worth.beyond(without[number])
                state.outlooks[index].plan(self._step, surplus, price, spent)
                there[number] = max(there[number], worth)
        for request, state in awake:
            self._let_go(request, state, market)
        for (_, state), guesses in zip(awake, found, strict=True):
            if not guesses:
                state.asleep_until = min(outlook.next for outlook in state.outlooks)
        some = {request: own for (request, _), own in zip(awake, found, strict=True) if own}
        verified = worth_verifying(some, market, sum(self._spent), self._batch)
        self._rows += sum(len(tree) - 1 for tree in verified.values())
        return verified

    def _prices(self, awake: Sequence[_Awake]) -> Market:
        """What nodes and seconds cost; looked at anew when the batch is another, and now and then."""
        context = sum(len(request.tokens) for request, _ in awake) / len(awake)
        nodes = max(request.max_nodes for request, _ in awake) - 1
        same = (self._rows, self._batch, len(awake), nodes, int(context / NEAR), self._step // PRICED)
        if self._market is None or self._market[0] != same:
            passes = self.times.span(self._rows, nodes * len(awake), context)
            rate = max(self._batch / float(passes[0]), self._rate)
            prices = (passes[:: len(awake)] - passes[0]) * (rate / len(awake))
            self._market = same, Market(rate, passes.tolist(), prices.tolist())
        return self._market[1]

    def _worth_asking(
        self, index: int, awake: Sequence[_Awake], without: Sequence[Worth], market: Market
    ) -> list[int]:
        """Numbers of the requests that a drafter is asked for: those whose turn has come, and of the others
        as many as together are worth the time."""
        price = market.call(self._cost(index, len(awake))) / len(awake)
        due, open_ = [], []
        for number, ((request, state), other) in enumerate(zip(awake, without, strict=True)):
            outlook = state.outlooks[index]
            late = market.call(self._backlogs[index].seconds(request))
            outlook.put_off(self._step, price + late)
            if outlook.next <= self._step and outlook.pause > 1:
                due.append(number)
            else:
                surplus = max(outlook.hope(market).beyond(other), outlook.surplus) - MARGIN
                if outlook.pause == 1:  # it was worth it the last time
                    surplus = max(surplus, price + MARGIN)
                surplus -= late / min(request.limit - len(request.tokens), HORIZON)
                if surplus > 0:
                    open_.append((surplus, number))
        open_.sort(reverse=True)
        most, keep, total = -market.call(self._cost(index, len(due))) if due else 0.0, 0, 0.0
        for taken, (surplus, _) in enumerate(open_, start=1):
            total += surplus
            net = total - market.call(self._cost(index, len(due) + taken))
            if net > most:
                most, keep = net, taken
        for _, number in open_[keep:]:
            awake[number][1].outlooks[index].wait(self._step, price)
        return due + [number for _, number in open_[:keep]]

    def _cost(self, index: int, requests: int) -> float:
        """Seconds that it takes to ask a drafter, and to decide what to make of its guesses."""
        return self._costs[index](requests) + self._deciding(requests)

    def _price(self, index: int, market: Market) -> float:
        """Of asking a drafter for all requests, in tokens of each."""
        return market.call(self._cost(index, self._batch)) / self._batch

    def _weigh(
        self, request: Request, state: _State, outlook: Outlook, tree: DraftTree, market: Market
    ) -> tuple[Found, Worth]:
        """A tree with the probabilities of its nodes; and what it is worth."""
        known = outlook.record.calibration.probabilities(tree)
        best, trust = sorted(known[1:], reverse=True), outlook.trust
        outlook.learn(gains_of(best, len(outlook.gains)), max(tree.depths))
        state.asked.append((outlook, len(request.tokens), tree, sum(best)))
        trusted = [min(p * trust, 1.0) for p in best]
        worth = Worth(market.best(accumulate(trusted, initial=0.0)), trusted[0] if trusted else 0.0)
        return (tree, [1.0, *[min(p * trust, 1.0) for p in known[1:]]]), worth

    def _propose_by(self, index: int, asked: Sequence[_Awake]) -> tuple[list[DraftTree], float]:
        """One drafter's trees, and the seconds that it took to show it all that it has missed."""
        requests = [request for request, _ in asked]
        late = self._clock()
        self._backlogs[index].show(requests)
        begin = self._clock()
        trees = self._ask(index, requests)
        end = self._clock()
        self._spent[index] = end - begin
        self._asking += end - late
        return trees, begin - late

    def _let_go(self, request: Request, state: _State, market: Market, unread: int = 0) -> None:
        """Note nothing more for drafters that will not be asked again before a request ends.

        Args:
            unread: tokens that will be noted before anyone can be asked.
        """
        left = request.limit - len(request.tokens)
        for index, (part, backlog) in enumerate(zip(self.parts, self._backlogs, strict=True)):
            outlook = state.outlooks[index]
            if part.taps and not outlook.gone:
                price = self._price(index, market)
                late = market.call(backlog.seconds(request) + backlog.reading(unread))
                outlook.put_off(self._step, price + late)
                hope = outlook.hope(market).tokens - late / max(min(left, HORIZON), 1)
                if outlook.next > self._step + left and hope < price:
                    outlook.leave()
                    backlog.forget(request)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn what the step cost, and show it to the drafters; to those that pause, later."""
        self._follow(self._clock(), observations)
        for index, part in enumerate(self.parts):
            asked = [seen for seen in observations if self._was_asked(index, seen.request)]
            if part.taps and len(asked) < len(observations):
                late = [seen for seen in observations if self._is_late(index, seen.request)]
                self._backlogs[index].keep(late)
            if asked:
                start = self._clock()
                part.observe([self._seen_by(index, seen) for seen in asked])
                self._watch(index, asked)
                seconds = self._spent[index] + self._clock() - start
                self._costs[index].record(len(asked), seconds)
                self._spent[index] = 0.0
        self._trees.clear()
        tokens = sum(len(seen.verdict.tokens) for seen in observations if seen.verdict is not None)
        rate = tokens / max(self._clock() - self._begin, 1e-9)
        self._rate = self._rate + RECENT * (rate - self._rate) if self._rate else rate

    def release(self, request: Request) -> None:
        """Forget a request; what it taught about the drafters stays."""
        state = self._states.pop(request, None)
        if state is not None:
            self._learn(request, state)
        for backlog in self._backlogs:
            backlog.forget(request)
        super().release(request)

    @property
    def times(self) -> StepTimes:
        """Of the target's passes."""
        if self._times is None:
            if self.target.times is None:
                raise ValueError("a controller needs the times of the target's passes")
            self._times = self.target.times()
        return self._times

    def _follow(self, now: float, observations: Sequence[Observation]) -> None:
        """See now and then how fast passes are."""
        if self._followed != self._begin or any(seen.verdict is None for seen in observations):
            return  # where prompts go along, their rows are not counted
        context = sum(len(seen.request.tokens) for seen in observations) / len(observations)
        self.times.follow(self._rows, context, max(now - self._end, 1e-9))

    def _was_asked(self, index: int, request: Request) -> bool:
        return index in self._trees.get(request, ())

    def _is_late(self, index: int, request: Request) -> bool:
        """Whether a drafter was not asked, and may be."""
        return not (self._was_asked(index, request) or self._open(request).outlooks[index].gone)

    def _learn(self, request: Request, state: _State) -> None:
        """Hold guesses against what has come."""
        still = []
        for outlook, behind, tree, expected in state.asked:
            right = settle(tree, request.tokens[behind:].tolist())
            if right is None:
                still.append((outlook, behind, tree, expected))
                continue
            outlook.record.calibration.record(tree, set(right))
            outlook.settle(expected, len(right))
        state.asked = still
