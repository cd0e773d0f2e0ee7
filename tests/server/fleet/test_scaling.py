"""The rule of scaling by its numbers, the fleet that follows it, and the route that overrules it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from fleets import FakeEngine, Fixture, heard, job, run, text, tokens, until

from soothsay.cli.serve_command import PlacementOptions
from soothsay.core.engine_load import EngineLoad
from soothsay.errors import SoothsayError
from soothsay.server.access.api_keys import KeyRing, add_key
from soothsay.server.engines.engine_messages import EngineUpdate, Loaded
from soothsay.server.fleet import engine_fleet as fleet
from soothsay.server.fleet import engine_fleet as scaling
from soothsay.server.fleet.engine_fleet import (
    FREE,
    FULL,
    GROW_AFTER,
    SHRINK_AFTER,
    Bounds,
    Fleet,
    Scaler,
)
from soothsay.server.http_server import Server
from soothsay.server.server_config import ServerConfig


@pytest.mark.parametrize(("given", "bounds"), [("2", (2, 2)), ("1:3", (1, 3)), ("1:1024", (1, 1024))])
def test_bounds_are_read(given: str, bounds: tuple[int, int]) -> None:
    assert Bounds.parse(given) == Bounds(*bounds)


@pytest.mark.parametrize(
    "given", ["", "0", "0:2", "3:1", "1:", ":3", "-1", "1:2:3", "x", "1:1025", "٣", "9" * 99]
)
def test_other_bounds_are_refused(given: str) -> None:
    with pytest.raises(SoothsayError, match="engines"):
        Bounds.parse(given)


def test_the_command_line_names_its_option() -> None:
    assert PlacementOptions("1:3").bounds() == Bounds(1, 3)
    with pytest.raises(typer.BadParameter, match=r"--replicas: 3:1"):
        PlacementOptions("3:1").bounds()


Crowd = tuple[int, int, float]
"""Engines that are to stay, those of them that serve, and their work."""


def times(seconds: float) -> Iterator[float]:
    return iter([step / 4 for step in range(int(seconds * 4) + 2)])


def size_after(scaler: Scaler, crowd: Crowd, seconds: float) -> int:
    """The last of the sizes while nothing changes. `GROW_AFTER` and `SHRINK_AFTER` are after it."""
    return [scaler.size(*crowd, now) for now in times(seconds)][-1]


def test_full_engines_get_another_one_and_not_before_its_time() -> None:
    crowd = (2, 2, 2 * FULL + 0.01)
    assert size_after(Scaler(Bounds(1, 4)), crowd, GROW_AFTER - 0.5) == 2
    scaler = Scaler(Bounds(1, 4))
    sizes = [scaler.size(*crowd, now) for now in times(2 * GROW_AFTER)]
    assert sizes.count(3) == 2, "then the time begins anew"
    assert size_after(Scaler(Bounds(1, 4)), (2, 2, 2 * FULL), 100) == 2
    assert size_after(Scaler(Bounds(1, 2)), crowd, GROW_AFTER) == 2, "bounds"


def test_no_engine_is_added_while_one_loads() -> None:
    scaler = Scaler(Bounds(1, 4))
    assert {scaler.size(2, 1, 5.0, now) for now in times(100)} == {2}


def test_an_engine_that_is_spare_goes_and_not_before_its_time() -> None:
    crowd = (3, 3, 2 * FREE - 0.01)
    assert size_after(Scaler(Bounds(1, 4)), crowd, SHRINK_AFTER - 0.5) == 3
    assert 2 in [size_after(Scaler(Bounds(1, 4)), crowd, SHRINK_AFTER + i / 4) for i in range(-1, 2)]
    assert size_after(Scaler(Bounds(3, 4)), crowd, SHRINK_AFTER) == 3
    stuck = Scaler(Bounds(1, 4))
    assert 1 in [stuck.size(2, 1, 0.0, now) for now in times(SHRINK_AFTER)], "one that cannot load too"


@pytest.mark.parametrize(
    "crowd",
    [(2, 2, 2 * FULL), (3, 3, 2 * FREE), (3, 3, 1.0), (2, 1, 5.0), (1, 1, 0.0)],
)
def test_neither_full_nor_spare_engines_stay_as_they_are(crowd: Crowd) -> None:
    """At each limit, between them, while one loads, and the last one."""
    scaler = Scaler(Bounds(1, 4))
    assert {scaler.size(*crowd, now) for now in times(4 * SHRINK_AFTER)} == {crowd[0]}


def test_spare_engines_go_one_at_a_time() -> None:
    scaler = Scaler(Bounds(1, 4))
    sizes = [scaler.size(4, 4, 0.0, now) for now in times(2 * SHRINK_AFTER)]
    assert sizes.count(3) == 2


def test_a_break_begins_the_time_anew() -> None:
    scaler = Scaler(Bounds(1, 4))
    for now in range(100):
        full = now % GROW_AFTER != 0
        assert scaler.size(1, 1, 1.0 if full else 0.5, now) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_an_engine_that_was_just_added_is_not_spare(size: int) -> None:
    scaler, work = Scaler(Bounds(1, 20)), FULL * size + 0.001
    seconds = times(4 * SHRINK_AFTER)
    assert size + 1 in (scaler.size(size, size, work, now) for now in seconds)
    after = {scaler.size(size + 1, size + 1, work, now) for now in seconds}
    assert min(after) == size + 1


def test_a_number_set_by_hand_stays() -> None:
    scaler = Scaler(Bounds(1, 3))
    scaler.fixed = 2
    assert size_after(scaler, (2, 2, 9.0), 100) == 2
    assert size_after(scaler, (2, 2, 0.0), 100) == 2
    scaler.fixed = None
    assert scaler.size(2, 2, 0.0, 101) == 1, "it has been spare for long"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TICK", 0.005)
    monkeypatch.setattr(scaling, "GROW_AFTER", 0.02)
    monkeypatch.setattr(scaling, "SHRINK_AFTER", 0.1)


@pytest.mark.usefixtures("quick", "each_loop")
@pytest.mark.parametrize(
    "full",
    [EngineLoad(8, 0, 0.5), EngineLoad(1, 8, 0.5), EngineLoad(1, 0, 0.95)],
    ids=["running", "waiting", "memory"],
)
def test_a_fleet_follows_its_load_within_its_bounds(full: EngineLoad) -> None:
    async def test() -> None:
        one = Fixture(Bounds(1, 3))
        for size in (1, 2, 3):
            await until(lambda size=size: len(one.engines) == size)
            if size > 1:
                one.engines[-1].load()
            await until(lambda size=size: len(one.fleet.jobs.serving) == size)
            for engine in one.engines:
                engine.tell(EngineUpdate(0.0, [], {}, full, {}))
        await asyncio.sleep(0.1)
        assert len(one.engines) == 3
        for engine in one.engines:
            engine.tell(EngineUpdate(0.0, [], {}, EngineLoad(0, 0, 0.0), {}))
        await until(lambda: len(one.replicas) == 1)
        await until(lambda: [engine.ends for engine in one.engines] == [0, 1, 1])
        await one.loop.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_the_work_of_drained_engines_counts() -> None:
    """It moves to the others in the end."""

    async def test() -> None:
        one = Fixture(Bounds(1, 2))
        one.fleet.scale(2)
        one.engines[1].load()
        await one.ready()
        one.fleet.scale(None)
        one.replicas[1].draining = True
        one.replicas[1].load = EngineLoad(8, 0, 0.5)
        await until(lambda: len(one.engines) == 3)
        await one.loop.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_the_only_engine_is_replaced_before_it_goes() -> None:
    async def test() -> None:
        one = Fixture(1)
        await one.ready()
        each = job()
        first = await one.begin(each)
        first.say(each, 2)
        await until(lambda: each.num_output == 2)
        one.fleet.drain(one.replicas[0])
        await until(lambda: len(one.engines) == 2)
        second = one.engines[1]
        await asyncio.sleep(0.05)
        assert len(one.replicas) == 2, "the first one serves until the second one is loaded"
        assert await one.begin(job()) is first
        second.load()
        await until(lambda: second.has(each))
        first.say(each, 1)
        second.say(each, 2, end=True)
        known, said = (await heard(each))[0]
        assert (known, said) == (tokens(each, 4), text(tokens(each, 4)))
        await one.loop.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_the_only_engine_without_jobs_serves_until_the_next_one_is_loaded() -> None:
    async def test() -> None:
        one = Fixture(1)
        await one.ready()
        one.fleet.drain(one.replicas[0])
        await until(lambda: len(one.engines) == 2)
        first, second = one.engines
        await asyncio.sleep(10 * fleet.TICK)
        assert len(one.replicas) == 2
        each = job()
        assert await one.begin(each) is first
        first.say(each, 1, end=True)
        await heard(each)
        second.load()
        await until(lambda: len(one.replicas) == 1)
        await until(lambda: (first.ends, second.ends) == (1, 0))
        await one.loop.stop()

    run(test)


@pytest.mark.usefixtures("quick")
def test_the_watch_over_engines_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        one = Fixture(1)
        with monkeypatch.context() as patch:
            patch.setattr(one.fleet.scaler, "size", lambda *_: 1 / 0)
            await until(lambda: "watch failed" in caplog.text)
        one.fleet.scaler.fixed = 2
        await until(lambda: len(one.replicas) == 2)
        await one.loop.stop()

    run(test)


def test_engines_end_if_the_first_cannot_load_the_model() -> None:
    engines = [FakeEngine() for _ in range(3)]

    def fail() -> Loaded:
        raise SoothsayError("no such model")

    engines[0].wait = fail  # type: ignore[method-assign]
    left = iter(engines)
    with pytest.raises(SoothsayError, match="no such model"):
        Fleet(lambda: next(left), Bounds(2, 3)).__enter__()
    assert [(engine.starts, engine.ends) for engine in engines] == [(1, 1), (1, 1), (0, 0)]


def app(size: Bounds, keys: KeyRing | None = None) -> tuple[Server, httpx.AsyncClient]:
    """A server of fake engines, and a client without a network."""
    server = Server(Fleet(FakeEngine, size).__enter__(), ServerConfig("m"), keys)
    return server, httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://x")


@pytest.mark.usefixtures("quick")
def test_the_number_of_engines_is_set_by_hand() -> None:
    async def test() -> None:
        server, client = app(Bounds(1, 3))
        async with server.lifespan(), client:
            shown = (await client.get("/replicas")).json()
            assert (shown["replicas"], shown["least"], shown["most"], shown["set_to"]) == (1, 1, 3, "auto")
            told = (await client.post("/replicas", json={"replicas": 3})).json()
            assert (told["replicas"], told["set_to"]) == (3, 3)
            for replica in server.fleet.replicas[1:]:
                assert isinstance(replica.engine, FakeEngine)
                replica.engine.load()
            await until(lambda: len(server.fleet.jobs.serving) == 3)
            told = (await client.post("/replicas", json={"drain": 0})).json()
            assert [one["status"] for one in told["engines"]] == ["draining", "ok", "ok"]
            await until(lambda: [one.number for one in server.fleet.replicas] == [1, 2, 3])
            told = (await client.post("/replicas", json={"replicas": "auto"})).json()
            assert told["set_to"] == "auto"
            await until(lambda: len(server.fleet.replicas) == 1)

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"replicas": 4}, 400),
        ({"replicas": 0}, 400),
        ({"replicas": "2"}, 400),
        ({"replicas": True}, 400),
        ({}, 400),
        ({"replicas": 2, "drain": 0}, 400),
        ({"drain": 7}, 404),
        ({"size": 2}, 400),
    ],
)
def test_what_cannot_be_is_refused(body: dict[str, object], status: int) -> None:
    async def test() -> None:
        server, client = app(Bounds(1, 3))
        async with server.lifespan(), client:
            reply = await client.post("/replicas", json=body)
            assert reply.status_code == status, reply.text
            assert len(server.fleet.replicas) == 1

    run(test)


def test_an_engine_is_drained_once() -> None:
    async def test() -> None:
        server, client = app(Bounds(1, 3))
        async with server.lifespan(), client:
            replies = [await client.post("/replicas", json={"drain": 0}) for _ in range(2)]
            assert [reply.status_code for reply in replies] == [200, 404]

    run(test)


def test_the_number_of_engines_is_for_operators(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    usual, operator = add_key(file, "usual"), add_key(file, "operator", operator=True)

    async def test() -> None:
        server, client = app(Bounds(1, 3), KeyRing(file))
        async with server.lifespan(), client:
            for key, status in (("", 401), (usual, 403), (operator, 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                body = {"replicas": 2}
                reply = await client.post("/replicas", json=body, headers=headers)
                assert reply.status_code == status, reply.text
                assert (await client.get("/replicas", headers=headers)).status_code == status
            assert len(server.fleet.replicas) == 2

    run(test)
