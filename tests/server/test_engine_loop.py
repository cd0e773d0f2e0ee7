"""Restarts and jobs of the event loop's side, with a process that dies when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from soothsay.core.answer import SpeculationStats
from soothsay.core.load import EngineLoad
from soothsay.core.params import SamplingParams
from soothsay.errors import ModelError
from soothsay.server.api_errors import ApiError
from soothsay.server.backoff import Backoff
from soothsay.server.engine_loop import EngineLoop, EngineState, without_canary
from soothsay.server.jobs import Job
from soothsay.server.messages import Admitted, AnswerUpdate, EngineUpdate, LoadedModel, Submit
from soothsay.server.metrics import Metrics
from soothsay.server.parameters import RequestOptions
from soothsay.server.server_config import ServerConfig

MODEL = LoadedModel(None, 100, 100, 8, 16, 50, "none", ("none",))


class Process:
    """What `EngineLoop` needs of an `EngineProcess`. `fail_starts` is how often it cannot start."""

    def __init__(self) -> None:
        self.pid, self.exit_code = 1, -9
        self.sent: list[Any] = []
        self.starts = self.fail_starts = self.kills = 0
        self.tell: Callable[[Any], None] = lambda _: None

    def start(self) -> None:
        if self.fail_starts:
            self.fail_starts -= 1
            raise OSError("no room")
        self.starts += 1

    def listen(self, receive: Callable[[Any], None]) -> None:
        self.tell = receive

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def end(self) -> None: ...

    def kill(self) -> None:
        self.kills += 1
        self.tell(None)

    @property
    def submitted(self) -> list[int]:
        return [message.job for message in self.sent if isinstance(message, Submit)]


def job(*, counted: bool = True) -> Job:
    return Job([[1]], SamplingParams(seed=0), RequestOptions(), "none", 60, counted=counted)


def make(**options: Any) -> tuple[EngineLoop, Process]:
    process, config = Process(), ServerConfig(name="m", **options)
    return EngineLoop(process, Metrics("m"), 8, config), process  # type: ignore[arg-type]


def update(number: int, tokens: int, *, ended: bool = False) -> EngineUpdate:
    answer = AnswerUpdate(number, 0, "x", None, [], tokens, 0, 0, SpeculationStats(), None)
    load, decisions = EngineLoad(0 if ended else 1, 0, 0.1), {"none": 1}
    return EngineUpdate(1.0, [answer], {number: None} if ended else {}, load, decisions)


async def until(true: Callable[[], object]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not happened")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_waits_double_and_begin_anew() -> None:
    backoff = Backoff(1.0, 60.0)
    assert [backoff.wait() for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    backoff.reset()
    assert [backoff.wait() for _ in range(3)] == [0, 1, 2]


def test_an_engine_that_dies_on_and_on_is_started_on_and_on() -> None:
    async def test() -> None:
        loop, process = make(restart_delay=0.001, max_restart_delay=0.004)
        loop.start()
        process.fail_starts = 2  # that counts as dying
        for _ in range(6):
            starts = process.starts
            process.tell(ModelError("no weights"))
            process.tell(None)
            await until(lambda starts=starts: process.starts > starts)
            assert loop.state is EngineState.STARTING
        assert loop.restarts == 8
        process.tell(MODEL)
        await until(lambda: loop.state is EngineState.OK)
        assert loop.engine_pid == 1

    run(test)


def test_clients_are_told_when_the_engine_will_be_started() -> None:
    async def test() -> None:
        loop, process = make(restart_delay=30.0)
        loop.start()
        for _ in range(2):
            process.tell(None)
            await until(lambda: loop.state is EngineState.STARTING and (loop.restarts or loop.restart_in))
        await until(lambda: loop.restart_in is not None)
        assert loop.engine_pid is None
        with pytest.raises(ApiError) as refused:
            await loop.submit(job())
        assert refused.value.status == 503
        assert 25 <= int(refused.value.headers["Retry-After"]) <= 30
        await loop.stop()
        assert (loop.state, loop.engine_pid) == (EngineState.STOPPED, None)

    run(test)


def test_a_sound_engine_is_restarted_at_once() -> None:
    async def test() -> None:
        loop, process = make(restart_delay=1000.0, settling=0.0)
        loop.start()
        for restarts in (1, 2, 3):
            process.tell(None)
            await until(lambda restarts=restarts: loop.restarts == restarts)
            process.tell(MODEL)
            await until(lambda: loop.state is EngineState.OK)

    run(test)


def test_jobs_without_a_token_go_to_the_next_engine_once() -> None:
    async def test() -> None:
        loop, process = make(restart_delay=0.001)
        loop.start()
        fresh, begun, own = job(), job(), job(counted=False)
        submitted = [asyncio.create_task(loop.submit(one)) for one in (fresh, begun, own)]
        await until(lambda: len(process.submitted) == 3)
        process.tell(Admitted(begun.number, [0]))
        process.tell(update(begun.number, 1))
        await until(lambda: begun.num_output)
        process.tell(None)
        await until(lambda: loop.restarts == 1)
        with pytest.raises(ApiError):
            [each async for each in begun]
        with pytest.raises(ApiError):
            await submitted[2]
        assert loop.in_flight == loop.num_jobs == 1
        process.tell(MODEL)
        await until(lambda: len(process.submitted) == 4)
        assert process.submitted[3] == fresh.number
        process.tell(None)
        with pytest.raises(ApiError):
            await submitted[0]
        assert loop.in_flight == loop.num_jobs == 0
        await until(lambda: loop.restarts == 2)

    run(test)


def test_a_canary_is_in_no_number_that_users_or_limits_see() -> None:
    async def test() -> None:
        loop, process = make()
        loop.start()
        loop.max_in_flight = loop.in_flight = 1  # full
        own = job(counted=False)
        submitted = asyncio.create_task(loop.submit(own))
        await until(lambda: process.submitted)
        process.tell(Admitted(own.number, [0]))
        await submitted
        before = loop._metrics.text()
        process.tell(update(own.number, 1))
        await until(lambda: loop.answered_at == 1.0)
        assert (loop.num_jobs, loop.in_flight) == (0, 1)
        process.tell(update(own.number, 2, ended=True))
        assert [each.num_output async for each in own] == [1, 2]
        assert loop._metrics.text() == before

    run(test)


def test_the_load_without_a_canary() -> None:
    assert without_canary(EngineLoad(3, 2, 0.5), 1) == EngineLoad(2, 2, 0.5)
    assert without_canary(EngineLoad(1, 0, 0.5), 1) == EngineLoad(0, 0, 0.0)
    assert without_canary(EngineLoad(0, 2, 0.5), 1) == EngineLoad(0, 1, 0.5)
    assert without_canary(EngineLoad(3, 2, 0.5), 0) == EngineLoad(3, 2, 0.5)
