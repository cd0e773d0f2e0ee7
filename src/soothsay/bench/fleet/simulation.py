"""Simulates engines behind a rule that gives requests to them, event by event."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from soothsay.bench.fleet.simulated_engine import SimulatedEngine, SimulatedRequest, Speculation
from soothsay.bench.fleet.step_times import StepTimes
from soothsay.bench.fleet.trace import TracedRequest
from soothsay.config import EngineConfig
from soothsay.errors import RequestError


class Rule(Protocol):
    """Which engine gets a request. The server's `Router` is one, and documents the methods."""

    def choose(  # noqa: D102
        self,
        answers: Mapping[int, int],
        prompts: Collection[tuple[int, Sequence[bytes]]],
        session: Hashable | None = None,
    ) -> int: ...

    def note(self, engine: int, digests: Sequence[bytes]) -> None: ...  # noqa: D102


class RoundRobin:
    """Engines get requests in turn."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def choose(  # noqa: D102
        self,
        answers: Mapping[int, int],
        prompts: Collection[tuple[int, Sequence[bytes]]],
        session: Hashable | None = None,
    ) -> int:
        return [*answers][next(self._next) % len(answers)]

    def note(self, engine: int, digests: Sequence[bytes]) -> None:  # noqa: D102
        pass


class LeastLoad:
    """The engine with the fewest answers gets a request. Ties go to the one that has waited longest."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._last: dict[int, int] = {}

    def choose(  # noqa: D102
        self,
        answers: Mapping[int, int],
        prompts: Collection[tuple[int, Sequence[bytes]]],
        session: Hashable | None = None,
    ) -> int:
        chosen = min(answers, key=lambda engine: (answers[engine], self._last.get(engine, -1)))
        self._last[chosen] = next(self._count)
        return chosen

    def note(self, engine: int, digests: Sequence[bytes]) -> None:  # noqa: D102
        pass


MakeRule = Callable[[int, int], Rule]
"""Makes a rule. Takes the tokens of a block, and the blocks of an engine's KV pool."""

OTHERS: dict[str, MakeRule] = {
    "least load": lambda block_size, capacity: LeastLoad(),
    "round robin": lambda block_size, capacity: RoundRobin(),
}
"""Rules that the router is compared with, by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a trace."""

    requests: Sequence[SimulatedRequest]  # in the order in which they ended

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(one.end for one in self.requests) - min(one.due for one in self.requests)

    @property
    def throughput(self) -> float:
        """Tokens of answers in a second."""
        return sum(one.request.num_output for one in self.requests) / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in a prefix cache."""
        found = sum(one.request.num_prefix_hits for one in self.requests)
        return found / sum(one.request.num_prompt for one in self.requests)

    def first_token(self, share: float = 0.5) -> float:
        """Seconds from a request to its first token: the quantile `share` over all requests."""
        return float(np.quantile([one.first - one.due for one in self.requests], share))


def simulate(
    trace: Iterable[TracedRequest],
    replicas: int,
    rule: MakeRule,
    times: StepTimes,
    config: EngineConfig,
    speculation: Speculation = Speculation(),  # noqa: B008
) -> Outcome:
    """Run a trace through engines that are all alike.

    Args:
        trace: the requests. A session's requests are sent in this order.
        replicas: number of engines.
        rule: makes the rule, such as the server's `Router`.
        times: of an engine's steps.
        config: of the engines, with `kv_tokens` filled in.
        speculation: what draft trees bring.

    Raises `RequestError` if a request does not fit into an engine's KV pool.
    """
    return _Simulation(replicas, rule, times, config, speculation).run(trace)


class _Simulation:
    def __init__(
        self,
        replicas: int,
        rule: MakeRule,
        times: StepTimes,
        config: EngineConfig,
        speculation: Speculation,
    ):
        self._config, self._speculation, self._now = config, speculation, 0.0
        kv_tokens = config.kv_tokens or 0
        self._room = kv_tokens // config.block_size * config.block_size
        self._rule = rule(config.block_size, kv_tokens // config.block_size)
        self._engines = [
            SimulatedEngine(config, times, speculation, lambda: self._now) for _ in range(replicas)
        ]
        self._sessions: dict[str, deque[TracedRequest]] = defaultdict(deque)
        self._events: list[tuple[float, int, TracedRequest | int]] = []  # a request, or an engine's step ends
        self._order = itertools.count()
        self._ended: list[SimulatedRequest] = []

    def run(self, trace: Iterable[TracedRequest]) -> Outcome:
        """Run all events in the order of their times."""
        for traced in trace:
            if traced.num_prompt + traced.answer.tokens > self._room:
                raise RequestError(
                    f"a request of session {traced.session[:40]} does not fit into the KV pool"
                )
            self._sessions[traced.session].append(traced)
        for waiting in self._sessions.values():
            self._plan(waiting[0].arrival, waiting[0])
        while self._events:
            self._now = self._events[0][0]
            changed: dict[int, None] = {}
            while self._events and self._events[0][0] == self._now:
                event = heapq.heappop(self._events)[2]
                changed[self._end_step(event) if isinstance(event, int) else self._send(event)] = None
            for engine in changed:
                self._begin_step(engine)
        return Outcome(self._ended)

    def _plan(self, time: float, event: TracedRequest | int) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _send(self, traced: TracedRequest) -> int:
        """Give a request to an engine, as the server's dispatcher does. Returns the engine's number."""
        simulated = SimulatedRequest.of(traced, self._now, self._config.block_size, self._speculation)
        answers = {number: engine.num_answers for number, engine in enumerate(self._engines)}
        digests = simulated.digests
        engine = self._rule.choose(answers, [(traced.num_prompt, digests)], traced.session)
        self._rule.note(engine, digests)
        self._engines[engine].add(simulated)
        return engine

    def _begin_step(self, number: int) -> None:
        engine = self._engines[number]
        if not engine.is_stepping and (seconds := engine.begin_step()):
            self._plan(self._now + seconds, number)

    def _end_step(self, number: int) -> int:
        for simulated in self._engines[number].end_step():
            self._rule.note(number, simulated.digests)
            self._ended.append(simulated)
            waiting = self._sessions[simulated.traced.session]
            waiting.popleft()
            if waiting:
                self._plan(max(waiting[0].arrival, self._now + waiting[0].pause), waiting[0])
        return number
