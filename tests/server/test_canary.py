"""What `/health` and `/ready` say while the engine works, fails, or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import httpx
import pytest
from fleets import until
from serving import Running, serving

from soothsay.server.fleet import watch as canary_module
from soothsay.server.fleet.replica import EngineState
from soothsay.server.fleet.watch import RETRY, Canary, Watch
from soothsay.server.http.api_errors import ApiError, internal_error
from soothsay.server.server_config import ServerConfig

SEEDED = {"model": "sibyl", "prompt": "A man", "seed": 7, "max_tokens": 8}


def get(running: Running, path: str) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(f"{running.url}/{path}")
    return reply.status_code, reply.json()


def test_a_sound_engine_is_ready_and_its_canaries_are_in_no_metric() -> None:
    with serving(engines.sibyl, canary_interval=0.05) as running:
        assert get(running, "ready") == (200, {"status": "ready"})
        status, body = get(running, "health")
        assert (status, body["status"]) == (200, "ok")
        first, answered = running.server.fleet.replicas[0].answered_at, set[float | None]()

        def asked_often() -> bool:
            answered.add(running.server.fleet.replicas[0].answered_at)
            assert running.in_engine == (0, 0)
            return len(answered) > 5

        running.wait_until(asked_often, 60)
        assert running.server.fleet.replicas[0].answered_at != first
        lines = httpx.get(f"{running.url}/metrics").text.splitlines()
        facts = ("http_requests", "_info{")  # these are not about answers
        counts = [line for line in lines if line[0] != "#" and not any(fact in line for fact in facts)]
        assert all(line.endswith(" 0.0") or "_created" in line for line in counts)


def test_an_engine_that_fails_at_every_request_is_not_ready() -> None:
    with serving(engines.useless, ready=False) as running:
        running.wait_until(lambda: get(running, "health")[1]["status"] == "engine failing", 60)
        assert get(running, "health")[0] == 503
        status, body = get(running, "ready")
        assert status == 503
        assert body["reason"] == "the engine does not answer: the server failed at this request; see its log"
        reply = httpx.post(f"{running.url}/v1/completions", json=SEEDED, timeout=60)
        assert reply.status_code == 500
        plain = {**SEEDED, "speculation": False}
        assert httpx.post(f"{running.url}/v1/completions", json=plain, timeout=60).status_code == 200
        assert get(running, "ready")[0] == 200, "a user's answer is as good a sign"


def test_an_engine_that_hangs_is_killed_and_restarted() -> None:
    """There is only one engine here. With another one, the server would stay ready."""
    limits = {"stall_timeout": 3.0, "canary_interval": 0.2, "canary_timeout": 0.5}
    with serving(engines.sibyl, replicas=1, **limits) as running:
        meant = httpx.post(f"{running.url}/v1/completions", json=SEEDED, timeout=60).json()["choices"]
        pid = get(running, "health")[1]["engine_pid"]
        os.kill(pid, signal.SIGSTOP)
        running.wait_until(lambda: get(running, "ready")[0] == 503)
        assert get(running, "ready")[1]["reason"].startswith("the engine does not answer")
        running.wait_until(lambda: get(running, "health")[1]["engine_restarts"] == 1, 60)
        running.wait_until(lambda: get(running, "ready")[0] == 200, 60)
        assert get(running, "health")[1]["engine_pid"] != pid
        reply = httpx.post(f"{running.url}/v1/completions", json=SEEDED, timeout=60)
        assert reply.json()["choices"] == meant


def test_a_place_for_measurements_that_is_of_no_use_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with serving(partial(engines.sibyl, drafter="suffix | prompt-lookup")) as running:
        assert httpx.post(f"{running.url}/v1/completions", json=SEEDED, timeout=60).status_code == 200


class Engine:
    """What a canary needs of an `EngineLoop` and of a `Replica`. `outcome`: what comes of a job."""

    def __init__(self, outcome: ApiError | None = None):
        self.state, self.pid = EngineState.OK, 1
        self.answered_at: float | None = None
        self.pinged_at: float | None = None
        self.started_at = time.monotonic()
        self.outcome = outcome
        self.is_mute = False  # whether jobs do not end
        self.kills = self.pings = self.jobs = self.cancels = 0

    async def submit(self, job: Any, engine: Any) -> None:
        assert engine is self
        self.jobs += 1
        assert not job.counted
        if self.outcome is not None:
            raise self.outcome
        if self.is_mute:
            return
        self.answered_at = time.monotonic()
        job.finish(None)

    def cancel(self, job: Any) -> None:
        self.cancels += 1

    def ping(self) -> None:
        self.pings += 1

    def kill(self) -> None:
        self.kills += 1


def canary(engine: Engine, **options: Any) -> Canary:
    config = ServerConfig(name="m", **{"canary_interval": 0.02, **options})
    return Canary(engine, engine, "none", config)  # type: ignore[arg-type]


async def watch(one: Canary, seconds: float) -> None:
    for _ in range(20):
        one.look()
        await asyncio.sleep(seconds / 20)
    one.stop()


def test_readiness_and_status_by_state() -> None:
    engine = Engine()
    one = canary(engine)
    assert one.problem == "the engine has not answered since it was started"
    assert one.status == "ok"
    engine.answered_at = time.monotonic()
    assert one.problem is None
    for failed in (ApiError(504, "too late", "timeout"), internal_error()):
        one._failure = time.monotonic(), failed
        assert one.problem == f"the engine does not answer: {failed.message}"
        assert one.status == ("ok" if failed.code == "timeout" else "engine failing")
    engine.state = EngineState.STARTING
    assert one.problem == one.status == "engine starting"
    engine.state, engine.answered_at = EngineState.OK, time.monotonic()
    assert (one.problem, one.status) == (None, "ok"), "a token after the failure is a good sign"


def test_an_engine_that_never_answers_is_killed_in_the_end() -> None:
    async def test() -> None:
        engine = Engine(internal_error())
        engine.started_at -= 50
        await watch(canary(engine, start_timeout=100.0), 0.1)
        assert (engine.kills, engine.pings) == (0, 0)
        assert engine.jobs >= 1
        await watch(canary(engine, start_timeout=40.0), 0.1)
        assert engine.kills > 0

    asyncio.run(test())


def test_only_an_engine_that_leaves_a_ping_unanswered_hangs() -> None:
    async def test() -> None:
        engine = Engine()
        engine.answered_at = engine.started_at
        engine.started_at -= 1000
        await watch(canary(engine, stall_timeout=10.0, start_timeout=100.0), 0.1)
        engine.pinged_at = time.monotonic() - 5
        await watch(canary(engine, stall_timeout=10.0), 0.1)
        assert engine.kills == 0
        assert engine.pings > 0
        engine.pinged_at = time.monotonic() - 20
        await watch(canary(engine, stall_timeout=10.0), 0.1)
        assert engine.kills > 0

    asyncio.run(test())


def test_a_canary_sings_only_when_nobody_else_does() -> None:
    async def test() -> None:
        engine = Engine()
        engine.answered_at = time.monotonic()
        await watch(canary(engine, canary_interval=50.0), 0.1)
        assert engine.jobs == 0
        engine.answered_at -= 60
        await watch(canary(engine, canary_interval=50.0), 0.1)
        assert engine.jobs == 1
        engine.state = EngineState.STARTING
        engine.answered_at = None
        await watch(canary(engine), 0.1)
        assert engine.jobs == 1

    asyncio.run(test())


def test_a_canary_that_is_late_is_given_up() -> None:
    async def test() -> None:
        engine = Engine()
        engine.is_mute = True
        one = canary(engine, canary_timeout=0.01)
        await one._ask()
        assert one.failure is not None
        assert (one.failure.code, engine.cancels) == ("timeout", 1)

    asyncio.run(test())


@pytest.mark.parametrize(("interval", "seconds"), [(1000.0, RETRY), (0.5, 0.5)])
def test_a_failed_canary_is_soon_repeated(interval: float, seconds: float) -> None:
    one = canary(Engine(), canary_interval=interval)
    one._asked_at = time.monotonic() - seconds + 0.4
    assert not one._is_due()
    one._asked_at -= 0.4
    assert one._is_due()


def test_an_engine_that_has_left_the_fleet_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "TICK", 0.004)

    async def test() -> None:
        stays, leaves = Engine(), Engine()
        stays.state = leaves.state = EngineState.STARTING
        fleet: Any = SimpleNamespace(replicas=[leaves, stays], model=SimpleNamespace(drafter="none"))
        watch = Watch(stays, fleet, ServerConfig(name="m"))  # type: ignore[arg-type]
        watching = asyncio.create_task(watch.run())
        await until(lambda: len(watch._canaries) == 2)
        fleet.replicas.remove(leaves)
        await until(lambda: [*watch._canaries] == [stays])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(test())


@pytest.mark.parametrize(("answered", "age"), [((None, None), None), ((None, 5.0), 5.0), ((9.0, 5.0), 5.0)])
def test_the_age_of_the_last_answer_is_that_of_the_newest(
    answered: tuple[float | None, ...], age: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    replicas = [SimpleNamespace(answered_at=None if ago is None else 100.0 - ago) for ago in answered]
    fleet: Any = SimpleNamespace(replicas=replicas)
    assert Watch(fleet, fleet, ServerConfig(name="m")).answer_age == age


def test_the_watch_outlives_its_own_errors() -> None:
    async def test() -> None:
        engine = Engine()
        engine.answered_at = time.monotonic() - 60
        engine.ping = None  # type: ignore[method-assign,assignment]
        await watch(canary(engine), 0.1)
        assert engine.jobs >= 1

    asyncio.run(test())
