"""Which engine gets a job, and when a job is moved, waits or fails. Engines here only note what they get."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from fleets import MODEL, NUMERICS

from soothsay.core.answer import FinishReason, SpeculationStats
from soothsay.core.engine_load import EngineLoad
from soothsay.core.numerics import UNKNOWN, Numerics
from soothsay.core.params import SamplingParams
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.server.engines.engine_messages import AnswerUpdate, Cancel, EngineUpdate, RequestOptions, Submit
from soothsay.server.fleet import dispatcher
from soothsay.server.fleet.dispatcher import IDLE_LOSSES, LATE, PATIENCE, Dispatcher
from soothsay.server.fleet.replica import EngineState
from soothsay.server.http.api_errors import ApiError

OTHER = Numerics("native, avx512", 100, "4567")

LONG = 10 * MODEL.block_size
"""Tokens of a prompt that cost more to read than two answers under way."""


class Silent:
    """Has the members of a `Replica` that a dispatcher reads."""

    def __init__(self, number: int):
        self.number, self.numerics = number, NUMERICS
        self.state, self.draining = EngineState.OK, False
        self.load = EngineLoad(0, 0, 0.0)
        self.answered_at: float | None = 0.0
        self.restart_in: float | None = None
        self.silence = 0.0
        self.sent: list[Any] = []

    def is_late(self, seconds: float) -> bool:
        return self.silence > seconds

    def send(self, message: Any) -> None:
        self.sent.append(message)


class World:
    """A dispatcher of silent engines, and what it told of jobs."""

    def __init__(self, size: int):
        self.engines = [Silent(number) for number in range(size)]
        self.told: list[Any] = []
        self.jobs = Dispatcher(self.engines, MODEL, self.told.append)  # type: ignore[arg-type]
        self._numbers = itertools.count()

    def submit(
        self, *prompts: Sequence[int], n: int = 1, tenant: Tenant = EVERYBODY, session: str = ""
    ) -> int:
        number = next(self._numbers)
        own = [*map(list, prompts)] or [[90 + number]]
        options = RequestOptions(tenant=tenant, session=session)
        self.jobs.submit(Submit(number, own, SamplingParams(n=n, seed=0), options))
        return number

    def holders(self, job: int) -> list[int]:
        """The engines that have a job, the runner first."""
        flight = self.jobs._flights[job]
        return [one.number for one in (flight.runner, flight.successor) if one is not None]

    def at(self, *prompts: Sequence[int], **options: Any) -> int:
        """The engine of a new job."""
        (engine,) = self.holders(self.submit(*prompts, **options))
        return engine

    def say(self, job: int, tokens: Sequence[int], before: int = 0, *, end: bool = False) -> None:
        """The runner says tokens."""
        flight = self.jobs._flights[job]
        assert flight.runner is not None
        count = before + len(tokens)
        reason = FinishReason.LENGTH if end else None
        call = flight.calls[flight.runner]
        stats = SpeculationStats()
        update = AnswerUpdate(call, 0, "", None, [], count, 0, 0, 0, stats, reason, tokens)
        ended = {call: None} if end else {}
        self.jobs.deliver(flight.runner, EngineUpdate(0.0, [update], ended, EngineLoad(0, 0, 0.0), {}))

    def refuse(self, job: int) -> None:
        """The successor says that it cannot do a job."""
        flight = self.jobs._flights[job]
        assert flight.successor is not None
        ended: dict[int, ApiError | None] = {flight.calls[flight.successor]: ApiError(400, "no", "no")}
        self.jobs.deliver(flight.successor, EngineUpdate(0.0, [], ended, EngineLoad(0, 0, 0.0), {}))

    def die(self, engine: int, restart_in: float | None = 0.0) -> None:
        self.engines[engine].state = EngineState.STARTING
        self.engines[engine].restart_in = restart_in
        self.jobs.lose(self.engines[engine])  # type: ignore[arg-type]

    def load(self, engine: int) -> None:
        self.engines[engine].state, self.engines[engine].restart_in = EngineState.OK, None
        self.jobs.welcome(self.engines[engine])  # type: ignore[arg-type]

    def only(self, engine: int) -> None:
        """Let new jobs go to this engine."""
        for one in self.engines:
            one.draining = one.number != engine

    @property
    def failed(self) -> dict[int, Any]:
        return {job: why for told in self.told for job, why in getattr(told, "ended", {}).items() if why}


def test_a_job_goes_where_its_prompt_was_sent_before_that_was_read() -> None:
    world = World(2)
    first = world.at(range(LONG))
    assert [world.at(range(LONG)), world.at(range(LONG))] == [first] * 2
    assert world.at(range(LONG)) != first, "three answers cost more than reading it"


def test_the_next_turn_goes_where_the_answer_is_cached() -> None:
    world = World(2)
    job = world.submit([5])
    (engine,) = world.holders(job)
    answer = [*range(LONG)]
    world.say(job, answer, end=True)
    busy = world.submit([6])
    if world.holders(busy) != [engine]:
        busy = world.submit([7])
    assert world.holders(busy) == [engine]
    assert world.at([5, *answer, 8]) == engine


def test_all_prompts_of_a_job_count() -> None:
    world = World(3)
    world.only(1)
    world.submit(range(LONG))
    world.only(2)
    world.submit([3])
    for engine in world.engines:
        engine.draining = False
    assert world.at([4], range(LONG), n=2) == 1


def test_the_answers_of_one_prompt_read_it_once() -> None:
    world = World(2)
    world.only(1)
    world.submit(range(LONG))
    world.submit([3], n=2)
    for engine in world.engines:
        engine.draining = False
    assert world.at(range(LONG), n=2) == 0, "three answers cost more than one reading, and less than two"


def test_each_answer_of_a_job_counts() -> None:
    world = World(2)
    many = world.at(n=3)
    one, two = world.at(), world.at()
    assert one == two != many
    assert world.at() != many
    assert world.at() in (many, one)


def test_sessions_of_two_tenants_with_one_name_have_nothing_to_do_with_each_other() -> None:
    world = World(2)
    ann, bob = Tenant("ann"), Tenant("bob")
    engines = []
    for number, tenant in enumerate((ann, ann, bob)):
        job = world.submit([number], tenant=tenant, session="s")
        engines += world.holders(job)
        world.say(job, [1], end=True)
    assert engines[0] == engines[1] != engines[2], "it is the other engine's turn"


def test_an_engine_that_has_died_is_not_chosen_for_what_it_had_read() -> None:
    world = World(2)
    job = world.submit(range(LONG))
    (engine,) = world.holders(job)
    world.say(job, [1], end=True)
    world.die(engine)
    world.load(engine)
    world.only(engine)
    world.submit([1])
    for one in world.engines:
        one.draining = False
    assert world.at(range(LONG)) != engine


def test_an_engine_that_has_left_is_forgotten() -> None:
    world = World(2)
    world.only(1)
    world.say(world.submit(range(LONG)), [1], end=True)
    gone = world.engines.pop()
    world.jobs.removed(gone)  # type: ignore[arg-type]
    held = weakref.ref(gone)
    del gone
    gc.collect()
    assert held() is None


def test_engines_that_have_not_answered_yet_or_are_late_get_no_new_jobs() -> None:
    world = World(3)
    world.engines[0].answered_at = None
    world.engines[1].silence = 2 * LATE
    assert {world.at() for _ in range(4)} == {2}
    world.engines[2].state = EngineState.STARTING
    assert {world.at() for _ in range(4)} == {0, 1}, "there are no others"


def test_a_job_does_not_move_to_an_engine_that_is_no_better() -> None:
    world = World(3)
    job = world.submit()
    world.say(job, [1])
    first, second, third = world.holders(job) + [one for one in range(3) if [one] != world.holders(job)]
    world.engines[first].silence = world.engines[second].silence = 2 * LATE
    world.engines[third].draining = True
    world.jobs.relieve()
    assert world.holders(job) == [first]
    for engine in world.engines:
        engine.draining, engine.silence = True, 0.0
    assert not world.jobs.hand_over(world.engines[first])  # type: ignore[arg-type]
    assert world.holders(job) == [first]
    world.engines[third].draining = False
    world.jobs.hand_over(world.engines[first])  # type: ignore[arg-type]
    assert world.holders(job) == [first, third]


def test_a_drained_engine_hands_over_a_few_answers_at_a_time() -> None:
    """Jobs of three answers each. An engine takes no more once it reads four answers of others."""
    world = World(2)
    world.only(0)
    jobs = [world.submit(n=3) for _ in range(3)]
    world.only(1)
    world.jobs.hand_over(world.engines[0])  # type: ignore[arg-type]
    assert [world.holders(job) for job in jobs] == [[0], [0, 1], [0, 1]], "the newest first"


def test_a_job_that_its_successor_refuses_stays_and_moves_later() -> None:
    world = World(2)
    world.only(0)
    job = world.submit()
    world.only(1)
    world.jobs.hand_over(world.engines[0])  # type: ignore[arg-type]
    world.refuse(job)
    assert (world.holders(job), world.failed) == ([0], {})
    submit, cancel = world.engines[1].sent
    assert cancel == Cancel(submit.job)
    world.jobs.hand_over(world.engines[0])  # type: ignore[arg-type]
    assert world.holders(job) == [0, 1]


@pytest.mark.parametrize("loads_with", [NUMERICS, OTHER])
def test_a_job_waits_for_its_numeric_mode_while_an_engine_loads(loads_with: Numerics) -> None:
    world = World(3)
    world.only(0)
    job = world.submit()
    world.say(job, [1])
    for engine in world.engines:
        engine.draining = False
    world.engines[1].numerics = OTHER
    world.engines[2].numerics, world.engines[2].state = UNKNOWN, EngineState.STARTING
    world.die(0)
    world.engines[0].numerics = OTHER
    world.load(0)
    assert (world.holders(job), world.failed) == ([], {}), "engine 2 may have its mode"
    world.engines[2].numerics = loads_with
    world.load(2)
    if loads_with == NUMERICS:
        assert world.holders(job) == [2]
    else:
        assert [*world.failed] == [job]


def test_a_job_of_an_engine_of_its_own_stays_there_and_ends_with_it() -> None:
    world = World(2)
    job = 7
    submit = Submit(job, [[1]], SamplingParams(seed=0), RequestOptions())
    world.jobs.submit(submit, world.engines[1])  # type: ignore[arg-type]
    assert world.holders(job) == [1]
    assert not world.jobs.has_jobs(world.engines[1])  # type: ignore[arg-type]
    assert world.jobs.hand_over(world.engines[1])  # type: ignore[arg-type]
    assert world.holders(job) == [1]
    world.die(1)
    assert [*world.failed] == [job]


def test_clients_are_told_when_the_first_engine_starts_again() -> None:
    world = World(2)
    assert world.jobs.restart_in is None
    for waits, seconds in (((7.2, 30.0), "8"), ((30.0, 7.2), "8"), ((0.0, 0.0), "1"), ((30.0, None), "1")):
        for engine, wait in zip(world.engines, waits, strict=True):
            engine.restart_in = wait
        assert world.jobs.no_engine().headers == {"Retry-After": seconds}


@pytest.mark.parametrize(("wait", "fails"), [(PATIENCE, False), (PATIENCE + 0.1, True)])
def test_jobs_wait_for_the_next_engine_unless_that_takes_long(wait: float, fails: bool) -> None:
    world = World(1)
    job = world.submit()
    world.die(0, wait)
    assert (job in world.failed) is fails
    if not fails:
        world.load(0)
        assert world.holders(job) == [0]


def test_a_job_that_goes_on_between_losses_has_a_number_of_engines_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "LOSSES", IDLE_LOSSES + 3)
    world = World(1)
    job = world.submit()
    for count in range(IDLE_LOSSES + 2):
        world.say(job, [1], count)
        world.die(0)
        assert not world.failed
        world.load(0)
    world.say(job, [1], IDLE_LOSSES + 2)
    world.die(0)
    assert [*world.failed] == [job]


def two_suspects(world: World) -> tuple[int, int]:
    """Two jobs that engines died under. The first is at an engine, and the second waits."""
    jobs = world.submit(), world.submit()
    for _ in range(IDLE_LOSSES):
        world.die(0)
        world.load(0)
    assert [world.holders(job) for job in jobs] == [[0], []]
    return jobs


def test_a_suspect_waits_until_the_one_before_it_has_a_token() -> None:
    world = World(1)
    first, second = two_suspects(world)
    world.submit()
    world.load(0)
    assert world.holders(second) == [], "another engine, and another job, do not end its wait"
    world.say(first, [1])
    assert world.holders(second) == [0]


def test_a_suspect_waits_for_a_younger_one_too() -> None:
    world = World(2)
    jobs = []
    for own in (0, 1):
        world.only(own)
        jobs.append(world.submit())
    for own in (1, 0):  # the younger job becomes a suspect first
        world.engines[1 - own].state = EngineState.STARTING
        for _ in range(IDLE_LOSSES):
            world.die(own)
            world.load(own)
        world.engines[1 - own].state = EngineState.OK
    assert [world.holders(job) for job in jobs] == [[], [1]]
    world.say(jobs[1], [1])
    assert world.holders(jobs[0]) == [1], "engine 0 is drained"


@pytest.mark.parametrize("how", ["cancelled", "ended", "lost"])
def test_a_suspect_begins_when_the_one_before_it_has_gone(how: str) -> None:
    world = World(2)
    world.engines[1].state = EngineState.STARTING
    first, second = two_suspects(world)
    if how == "cancelled":
        world.jobs.cancel(first)
    elif how == "ended":
        world.say(first, [1], end=True)
    else:
        world.engines[1].state = EngineState.OK
        world.die(0)
        assert [*world.failed] == [first]
    assert world.holders(second) == [1 if how == "lost" else 0]


def test_a_job_that_is_given_up_is_cancelled_wherever_it_is() -> None:
    world = World(2)
    job = world.submit()
    (runner,) = world.holders(job)
    world.engines[runner].draining = True
    world.jobs.hand_over(world.engines[runner])  # type: ignore[arg-type]
    assert len(world.holders(job)) == 2
    world.jobs.cancel(job)
    for engine in world.engines:
        submit, cancel = engine.sent
        assert cancel == Cancel(submit.job)
        assert not world.jobs.has_jobs(engine)  # type: ignore[arg-type]


def test_a_job_that_ends_at_its_runner_is_taken_from_its_successor() -> None:
    world = World(2)
    job = world.submit()
    (runner,) = world.holders(job)
    world.engines[runner].draining = True
    world.jobs.hand_over(world.engines[runner])  # type: ignore[arg-type]
    world.say(job, [1], end=True)
    submit, cancel = world.engines[1 - runner].sent
    assert cancel == Cancel(submit.job)


def test_the_load_of_all_engines() -> None:
    world = World(2)
    world.engines[0].load, world.engines[1].load = EngineLoad(3, 1, 0.5), EngineLoad(2, 0, 0.1)
    assert world.jobs.load == EngineLoad(5, 1, 0.3)


def test_the_load_of_an_engine_that_has_died_is_told_at_once() -> None:
    world = World(2)
    world.engines[1].load = EngineLoad(2, 1, 0.5)
    world.die(0)
    assert world.told[-1].load == EngineLoad(2, 1, 0.25)
