"""Jobs that move between engines: every answer goes on at its next token, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from fleets import NUMERICS, FakeEngine, Fixture, heard, job, run, text, tokens, until

from soothsay.core.answer import SpeculationStats
from soothsay.server.engines.engine_messages import CatchUp
from soothsay.server.fleet import dispatcher
from soothsay.server.fleet import engine_fleet as fleet
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica import EngineState
from soothsay.server.http.api_errors import ApiError

pytestmark = pytest.mark.usefixtures("each_loop")

OTHER = type(NUMERICS)("native, avx512", 100, "4567")


def test_a_job_of_an_engine_that_dies_goes_on_at_another_one() -> None:
    async def test() -> None:
        one = Fixture(2, restart_delay=1000.0)
        await one.ready()
        each = job(logprobs=0)
        engine = await one.begin(each)
        engine.say(each, 5)
        await until(lambda: each.num_output == 5)
        engine.die()
        (other,) = [replica for replica in one.engines if replica is not engine]
        await until(lambda: other.submits)
        assert other.submits[0].emitted[0].tokens == tokens(each, 5)
        other.say(each, 3)
        other.say(each, 1, end=True)
        known, said = (await heard(each))[0]
        assert known == tokens(each, 9)
        assert said == text(known)
        assert one.fleet.jobs.moved == 1
        assert one.fleet.state is EngineState.OK

    run(test)


async def handed_over(one: Fixture, each: Job) -> tuple[FakeEngine, FakeEngine]:
    """The engine of a job, which is drained, and the one that takes over but has said nothing yet."""
    engine = await one.begin(each)
    one.fleet.drain(one.replicas[one.engines.index(engine)])
    (other,) = [replica for replica in one.engines if replica is not engine]
    await until(lambda: other.submits)
    return engine, other


def test_a_successor_learns_what_was_said_until_the_engine_died() -> None:
    async def test() -> None:
        one = Fixture(2, restart_delay=1000.0)
        await one.ready()
        each = job(n=2)
        engine, other = await handed_over(one, each)
        engine.say(each, 5, end=True)
        engine.say(each, 2, index=1)
        engine.die()
        await until(lambda: other.position(each, 1) == 2)
        assert other.position(each) == 5
        told = [message for message in other.sent if isinstance(message, CatchUp)]
        assert len(told) == 1
        other.say(each, 1, index=1, end=True)
        assert [known for known, _ in (await heard(each)).values()] == [tokens(each, 5), tokens(each, 3, 1)]

    run(test)


def test_a_job_whose_answers_have_all_ended_needs_no_further_engine() -> None:
    """The engine that said the last token did not know yet that it was the last one, and died."""

    async def test() -> None:
        one = Fixture(2, restart_delay=1000.0)
        await one.ready()
        each = job(n=2)
        engine, other = await handed_over(one, each)
        engine.say(each, 5, end=True)
        engine.die()
        other.say(each, 5, index=1, end=True)
        other.die()
        assert [known for known, _ in (await heard(each)).values()] == [tokens(each, 5), tokens(each, 5, 1)]

    run(test)


def test_a_drained_engine_keeps_an_answer_until_another_one_has_its_next_token() -> None:
    async def test() -> None:
        one = Fixture(2)
        await one.ready()
        each = job()
        engine = await one.begin(each)
        engine.say(each, 2)
        await until(lambda: each.num_output == 2)
        replica = one.replicas[one.engines.index(engine)]
        one.fleet.drain(replica)
        (other,) = [each for each in one.engines if each is not engine]
        await until(lambda: other.submits)
        engine.say(each, 4)  # it still answers
        await until(lambda: each.num_output == 6)
        other.say(each, 1)
        other.say(each, 1)  # it has not heard yet what is known
        await until(lambda: other.position(each) == 6)
        engine.say(each, 1)  # while the other one reads what is known
        await until(lambda: each.num_output == 7)
        other.say(each, 1)  # this is known, too, but now it is the other's job
        await until(lambda: not engine.has(each))
        engine.say(each, 5)  # too late
        other.say(each, 1)
        other.say(each, 1, end=True)
        known, said = (await heard(each))[0]
        assert known == tokens(each, 9)
        assert said == text(known)
        await until(lambda: replica not in one.replicas)
        await until(lambda: engine.ends == 1)
        late = job()
        assert await one.begin(late) is other

    run(test)


def test_answers_of_an_engine_that_is_silent_go_on_at_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "LATE", 0.05)

    async def test() -> None:
        one = Fixture(2)
        await one.ready()
        begun, fresh = job(session="s"), job(session="s")
        engine = await one.begin(begun)
        assert await one.begin(fresh) is engine, "by its session"
        engine.say(begun, 2)
        await until(lambda: begun.num_output == 2)
        engine.deaf = True
        (other,) = [each for each in one.engines if each is not engine]
        await until(lambda: other.submits)
        assert [submit.prompts for submit in other.submits] == [begun.prompts], "a first token may take long"
        late = job(session="s")
        assert await one.begin(late) is other
        other.say(begun, 1)
        await until(lambda: begun.num_output == 3)
        engine.deaf = False
        engine.say(begun, 1)
        other.say(begun, 1, end=True)
        assert (await heard(begun))[0][0] == tokens(begun, 4)

    run(test)


def test_an_answer_that_does_not_begin_leaves_a_silent_engine_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "TICK", 0.01)
    monkeypatch.setattr(dispatcher, "LATE", 0.05)
    monkeypatch.setattr(dispatcher, "LATE_TO_BEGIN", 0.2)

    async def test() -> None:
        one = Fixture(2)
        await one.ready()
        each = job()
        engine = await one.begin(each)
        engine.deaf = True
        (other,) = [own for own in one.engines if own is not engine]
        await until(lambda: other.has(each))
        assert one.replicas[one.engines.index(engine)].silence > 0.2, "not before its time"
        other.say(each, 2, end=True)
        assert (await heard(each))[0][0] == tokens(each, 2)

    run(test)


def test_a_job_stays_within_its_numeric_mode(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        one = Fixture(3, OTHER, restart_delay=0.001)
        await one.ready()
        assert [record.message for record in caplog.records].count("numeric modes differ") == 2
        begun, same, fresh = job(), job(), job()
        engine, second, third = [await one.begin(each) for each in (begun, same, fresh)]
        assert [engine, second, third] == one.engines
        for each in (begun, same):
            (holder,) = one.holders(each)
            holder.say(each, 2)
            await until(lambda each=each: each.num_output == 2)
        second.die()
        await until(lambda: third.has(same))
        engine.die()
        await until(lambda: one.fleet.restarts == 2)
        second.load(OTHER)
        await until(lambda: len(one.fleet.jobs.serving) == 2)
        assert not second.has(begun), "it waits for an engine of its mode"
        engine.load(OTHER)
        with pytest.raises(ApiError, match="numeric mode"):
            await heard(begun)

    run(test)


def test_a_fleet_grows_and_shrinks() -> None:
    async def test() -> None:
        one = Fixture(1, drain=60.0)
        one.fleet.scale(3)
        assert len(one.engines) == len(one.replicas) == 3
        for engine in one.engines[1:]:
            engine.load()
        await one.ready()
        assert one.loop.max_in_flight == 3 * 8 + 256
        jobs = [job() for _ in range(3)]
        assert {id(await one.begin(each)) for each in jobs} == {id(engine) for engine in one.engines}
        one.fleet.scale(1)
        await asyncio.sleep(0.02)
        assert len(one.replicas) == 3, "their answers have not ended"
        assert one.loop.max_in_flight == 8 + 256, "that is what will stay"
        for each in jobs:
            (engine,) = one.holders(each)
            engine.say(each, 1, end=True)
        await until(lambda: len(one.replicas) == 1)
        await until(lambda: [engine.ends for engine in one.engines] == [0, 1, 1])
        one.fleet.scale(0)
        assert not one.replicas[0].draining
        one.fleet.__exit__(None, None, None)
        assert [engine.ends for engine in one.engines] == [1, 1, 1], "those that have left end once"

    run(test)


ROWS = 80
"""Tokens of a prompt, and tokens of contexts that an engine reads in a step."""

LONG = 150
"""Tokens of an answer that outlasts a drain."""


class Steps:
    """The steps of a fake engine: it reads contexts in order of arrival, and then says a token a step."""

    def __init__(self, engine: FakeEngine, jobs: list[Job]):
        self.engine, self.jobs = engine, {each.prompts[0][0]: each for each in jobs}
        self.read: Counter[int] = Counter()

    def step(self) -> None:
        rows = ROWS
        for submit in self.engine.submits:
            each = self.jobs[submit.prompts[0][0]]
            said = self.engine.position(each)
            if said == LONG or not self.engine.has(each):
                continue
            pending = ROWS + said - self.read[submit.job]
            count = pending if pending == 1 else min(pending, rows)
            rows -= count if pending > 1 else 0
            self.read[submit.job] += count
            if count == pending:
                self.engine.say(each, 1, end=said + 1 == LONG)


def test_answers_of_a_drained_engine_do_not_pause_and_newcomers_do_not_wait_for_them() -> None:
    """If all moved at once, the newcomer would wait for 24 prompts, of which an engine reads one a step."""

    async def test() -> None:
        one = Fixture(2)
        await one.ready()
        jobs, late = [job([i] * ROWS) for i in range(24)], job([24] * ROWS)
        one.replicas[1].draining = True
        for each in jobs:
            await one.begin(each)
        one.replicas[1].draining = False
        engines = [Steps(engine, [*jobs, late]) for engine in one.engines]
        counts, quiet, longest, waited = [0] * len(jobs), [0] * len(jobs), 0, 0
        for step in range(LONG + 100):
            for engine in engines:
                engine.step()
            await asyncio.sleep(0)
            if step < 30:  # all prompts are read
                continue
            if step == 30:
                one.replicas[0].draining = True
            if step == 34:
                assert await one.begin(late) is one.engines[1]
            one.fleet.jobs.hand_over(one.replicas[0])
            waited += step > 34 and late.num_output == 0
            before, counts = counts, [each.num_output for each in jobs]
            quiet = [
                0 if now > old or now == LONG else steps + 1
                for steps, old, now in zip(quiet, before, counts, strict=True)
            ]
            longest = max(longest, *quiet)
        assert one.fleet.jobs.moved == len(jobs)
        assert longest <= 2
        assert waited <= 12
        assert [one.prompts for one in one.engines[1].submits[:4]] == [one.prompts for one in jobs[:-5:-1]]
        for each in jobs:
            assert (await heard(each))[0][0] == tokens(each, LONG)

    run(test)


LENGTH = 30
"""Tokens of an answer."""


def speak(engine: FakeEngine, each: Job, random_: random.Random) -> None:
    """Let an engine say some tokens of a job, if it has the job."""
    if not engine.has(each):
        return
    left = {index: LENGTH - engine.position(each, index) for index in range(each.size)}
    if open_ := [index for index, count in left.items() if count]:
        index = random_.choice(open_)
        count = min(random_.randint(1, 4), left[index])
        engine.say(each, count, index, end=count == left[index])


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_events_each_answer_is_told_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines say, die, come back and are drained in random order. Answers are as from a single engine."""
    monkeypatch.setattr(dispatcher, "IDLE_LOSSES", 1000)
    monkeypatch.setattr(dispatcher, "LOSSES", 1000)
    random_ = random.Random(seed)

    async def test() -> None:
        one = Fixture(3, restart_delay=0.0, max_restart_delay=0.0)
        await one.ready()
        jobs = [job(n=1 + i % 3, logprobs=i % 2 or None) for i in range(8)]
        hearing = []
        for each in jobs:
            await one.begin(each)
            hearing.append(asyncio.create_task(heard(each)))
        while any(not each.done() for each in hearing):
            await asyncio.sleep(0)
            engine, event = random_.choice([each.engine for each in one.replicas]), random_.random()
            assert isinstance(engine, FakeEngine)
            lasting = [each for each in one.replicas if not each.draining]
            if event < 0.03:
                engine.die()
                await until(lambda: all(each.restart_in is None for each in one.replicas))
            elif event < 0.06 and len(lasting) > 1:
                one.fleet.drain(random_.choice(lasting))
            elif event < 0.12 and len(one.replicas) < 3:
                one.fleet.scale(3)
            elif event < 0.2:
                for replica in one.replicas:
                    if replica.state is EngineState.STARTING:
                        engine = replica.engine
                        assert isinstance(engine, FakeEngine)
                        engine.load()
                        await until(lambda one=replica: one.state is not EngineState.STARTING)
            else:
                speak(engine, random_.choice(jobs), random_)
        for each, answers in zip(jobs, [task.result() for task in hearing], strict=True):
            for index, (known, said) in answers.items():
                assert known == tokens(each, LENGTH, index)
                assert said == text(known)
        assert one.fleet.jobs.moved > 0

    run(test)


def test_statistics_of_two_parts() -> None:
    first, whole = SpeculationStats(), SpeculationStats()
    parts = [(3, 2, ["a"], 2), (0, 0, [], 1), (4, 3, ["a", "b", "b"], 4)]
    for drafted, depth, authors, emitted in parts:
        whole.record(drafted, depth, authors, emitted)
    first.record(*parts[0])
    second = whole.minus(first)
    assert (second.steps, second.emitted, second.accepted) == (2, 5, 3)
    assert first.plus(second) == whole
    assert SpeculationStats().plus(whole) == whole
    assert whole.minus(SpeculationStats()) == whole
