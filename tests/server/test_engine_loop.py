"""Jobs and restarts, with one engine that dies when a test says so."""

from __future__ import annotations

import asyncio

import pytest
from fleets import Fixture, heard, job, run, text, tokens, until

from soothsay.core.engine_load import EngineLoad
from soothsay.core.params import SamplingParams
from soothsay.errors import ModelError
from soothsay.server.engines.engine_messages import EngineUpdate, RequestOptions
from soothsay.server.fleet.engine_loop import without_canary
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica import Backoff, EngineState
from soothsay.server.http.api_errors import ApiError

pytestmark = pytest.mark.usefixtures("each_loop")


def test_waits_double_and_begin_anew() -> None:
    backoff = Backoff(1.0, 60.0)
    assert [backoff.wait() for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    backoff.reset()
    assert [backoff.wait() for _ in range(3)] == [0, 1, 2]


def test_an_engine_that_dies_on_and_on_is_started_on_and_on() -> None:
    async def test() -> None:
        one = Fixture(restart_delay=0.001, max_restart_delay=0.004)
        (engine,) = one.engines
        engine.fail_starts = 2  # that counts as dying
        for _ in range(6):
            starts = engine.starts
            engine.tell(ModelError("no weights"))
            engine.die()
            await until(lambda starts=starts: engine.starts > starts)
            assert one.fleet.state is EngineState.STARTING
        assert one.fleet.restarts == 8
        engine.load()
        await until(lambda: one.fleet.state is EngineState.OK)
        assert one.replicas[0].pid == 1

    run(test)


def test_clients_are_told_when_the_engine_will_be_started() -> None:
    async def test() -> None:
        one = Fixture(restart_delay=30.0)
        (engine,) = one.engines
        waiting = job()
        await one.begin(waiting)
        engine.die()
        await until(lambda: one.fleet.restarts)
        assert one.loop.in_flight == 1
        engine.die()
        await until(lambda: one.replicas[0].restart_in)
        assert one.replicas[0].pid is None
        with pytest.raises(ApiError) as refused:
            await one.loop.submit(job())
        assert refused.value.status == 503
        assert 25 <= int(refused.value.headers["Retry-After"]) <= 30
        with pytest.raises(ApiError):  # nobody waits for so long
            await heard(waiting)
        await one.loop.stop()
        assert (one.fleet.state, one.replicas[0].pid) == (EngineState.STOPPED, None)

    run(test)


def test_an_engine_that_has_served_for_a_while_is_restarted_at_once() -> None:
    async def test() -> None:
        one = Fixture(restart_delay=1000.0, settling=0.05)
        (engine,), (replica,) = one.engines, one.replicas
        for restarts in (1, 2, 3):
            await asyncio.sleep(0.06)
            replica.answered_at = 0.0
            engine.die()
            await until(lambda restarts=restarts: one.fleet.restarts == restarts)
            engine.load()
            await until(lambda: one.fleet.state is EngineState.OK)

    run(test)


@pytest.mark.parametrize("young", [True, False])
def test_an_engine_that_dies_young_or_has_not_answered_waits(young: bool) -> None:
    async def test() -> None:
        one = Fixture(restart_delay=1000.0, settling=1000.0 if young else 0.0)
        (engine,), (replica,) = one.engines, one.replicas
        engine.die()
        await until(lambda: one.fleet.restarts == 1)
        engine.load()
        await until(lambda: one.fleet.state is EngineState.OK)
        replica.answered_at = 0.0 if young else None
        engine.die()
        await until(lambda: replica.restart_in)
        assert (replica.restart_in or 0) > 50

    run(test)


def test_jobs_go_on_at_the_next_engine() -> None:
    async def test() -> None:
        one = Fixture(restart_delay=0.001)
        (engine,) = one.engines
        fresh, begun, own = job(seed=None), job(n=2, logprobs=0), job(counted=False)
        for each in (fresh, begun):
            await one.begin(each)
        submitted = asyncio.create_task(one.loop.submit(own, one.replicas[0]))
        await until(lambda: len(engine.submits) == 3)
        engine.say(begun, 3)
        engine.say(begun, 2, index=1)
        await until(lambda: begun.num_output == 5)
        engine.die()
        await until(lambda: one.fleet.restarts == 1)
        with pytest.raises(ApiError):
            await submitted
        assert (one.loop.in_flight, one.loop.num_jobs) == (3, 2)
        engine.load()
        await until(lambda: len(engine.submits) == 5)
        first, second = engine.submits[:2], engine.submits[3:]
        assert second[0].params == first[0].params, "with the same seed"
        assert [said.tokens for said in second[1].emitted] == [
            tokens(begun, 3),
            tokens(begun, 2, 1),
        ]
        engine.say(begun, 2, end=True)
        engine.say(begun, 4, index=1, end=True)
        engine.say(fresh, 1, end=True)
        for each, counts in ((begun, (5, 6)), (fresh, (1,))):
            for index, (known, said) in (await heard(each)).items():
                assert known == tokens(each, counts[index], index)
                assert said == text(known)
        assert [answer.stats.emitted for answer in begun.answers] == [5, 6]
        assert [answer.stats.steps for answer in begun.answers] == [2, 2]
        assert one.loop.in_flight == one.loop.num_jobs == 0

    run(test)


def test_a_job_that_kills_engines_has_three_and_others_survive_it() -> None:
    async def test() -> None:
        one = Fixture(restart_delay=0.001)
        (engine,) = one.engines
        bad, good = job(), job()
        for each in (bad, good):
            await one.begin(each)
        for deaths in (1, 2):
            engine.die()
            await until(lambda deaths=deaths: one.fleet.restarts == deaths)
            engine.load()
            await until(lambda deaths=deaths: len(engine.submits) >= 2 + 2 * deaths - (deaths == 2))
        assert len(engine.submits) == 5, "both are suspects, and begin one at a time"
        assert engine.submits[4].prompts == bad.prompts
        engine.die()
        with pytest.raises(ApiError):
            await heard(bad)
        await until(lambda: one.fleet.restarts == 3)
        engine.load()
        await until(lambda: len(engine.submits) == 6)
        engine.say(good, 4, end=True)
        assert (await heard(good))[0][0] == tokens(good, 4)

    run(test)


def test_as_many_answers_as_the_limit_says_are_in_flight() -> None:
    async def test() -> None:
        one = Fixture(max_queue=2)
        assert one.loop.max_in_flight == 8 + 2
        await one.begin(job(n=9))
        last = job()
        engine = await one.begin(last)
        with pytest.raises(ApiError, match="too many requests"):
            await one.loop.submit(job())
        with pytest.raises(ApiError, match="11 answers at once"):
            await one.loop.submit(job(n=11))
        engine.say(last, 1, end=True)
        await heard(last)
        await one.begin(job())
        await one.loop.stop()

    run(test)


def test_a_job_whose_time_is_up_before_it_is_admitted_is_taken_back() -> None:
    async def test() -> None:
        one = Fixture()
        late = Job([[1]], SamplingParams(seed=0), RequestOptions(), "none", 0.02)
        with pytest.raises(ApiError) as error:
            await one.loop.submit(late)
        assert error.value.status == 504
        assert (one.loop.in_flight, one.loop.num_jobs) == (0, 0)
        (engine,) = one.engines
        assert engine.submits
        assert not engine.has(late)
        await one.loop.stop()

    run(test)


def test_a_canary_is_in_no_number_that_users_or_limits_see() -> None:
    async def test() -> None:
        one = Fixture(max_queue=0)
        one.loop.in_flight = one.loop.max_in_flight  # full
        own = job(counted=False)
        submitted = asyncio.create_task(one.loop.submit(own, one.replicas[0]))
        (engine,) = one.engines
        await until(lambda: engine.submits)
        engine.admit(own)
        await submitted
        before = one.metrics.text()
        engine.say(own)
        await until(lambda: one.replicas[0].answered_at == 1.0)
        assert (one.loop.num_jobs, one.loop.in_flight) == (0, one.loop.max_in_flight)
        engine.say(own, end=True)
        assert [each.num_output async for each in own] == [1, 2]
        assert one.metrics.text() == before

    run(test)


def test_a_load_without_a_canary_that_has_ended_is_that_of_users() -> None:
    async def test() -> None:
        one = Fixture()
        engine = await one.begin(job())
        own = job(counted=False)
        submitted = asyncio.create_task(one.loop.submit(own, one.replicas[0]))
        await until(lambda: engine.has(own))
        engine.admit(own)
        await submitted
        for load, ended in ((EngineLoad(2, 0, 0.1), {}), (EngineLoad(1, 0, 0.1), {own.number: None})):
            engine.tell(EngineUpdate(1.0, [], ended, load, {}))
            await until(lambda load=load: one.replicas[0].load == load)
            assert b'num_requests_running{model_name="m"} 1.0' in one.metrics.text()

    run(test)


def test_a_job_whose_client_leaves_before_its_engine_has_it_is_given_up() -> None:
    async def test() -> None:
        one = Fixture()
        left = job()
        submitted = asyncio.create_task(one.loop.submit(left))
        await until(lambda: one.holders(left))
        submitted.cancel()
        await asyncio.gather(submitted, return_exceptions=True)
        assert (one.loop.in_flight, one.holders(left)) == (0, [])

    run(test)


def test_the_load_without_a_canary() -> None:
    assert without_canary(EngineLoad(3, 2, 0.5), 1) == EngineLoad(2, 2, 0.5)
    assert without_canary(EngineLoad(1, 0, 0.5), 1) == EngineLoad(0, 0, 0.0)
    assert without_canary(EngineLoad(0, 2, 0.5), 1) == EngineLoad(0, 1, 0.5)
    assert without_canary(EngineLoad(3, 2, 0.5), 0) == EngineLoad(3, 2, 0.5)
