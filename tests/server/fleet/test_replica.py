"""One engine of a fleet: how long it may be silent, and what is left of it after its death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import NUMERICS, FakeEngine, run, until

from soothsay.core.engine_load import EngineLoad
from soothsay.server.engines.engine_messages import EngineUpdate, Loaded, Ping, Pong
from soothsay.server.fleet import replica as replica_module
from soothsay.server.fleet.replica import IDLE, EngineState, Replica
from soothsay.server.server_config import ServerConfig


class World:
    """A replica, its engine, which answers no ping by itself, and a clock."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: Any):
        self.now = 100.0
        patch.setattr(replica_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.heard: list[Any] = []
        self.engine, config = FakeEngine(), ServerConfig("m", **options)
        self.engine.deaf = True
        self.replica = Replica(0, self.engine, config, lambda _, said: self.heard.append(said), lambda: None)
        self.replica.listen(Loaded(NUMERICS, b""))

    async def tell(self, message: Any) -> None:
        """Let the engine say something, and the event loop hear it."""
        self.engine.tell(message)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def be_silent(self, seconds: float) -> None:
        """Let the engine answer a ping after some seconds."""
        self.replica.ping()
        self.now += seconds
        await self.tell(Pong())


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda **options: World(monkeypatch, **options)


def test_an_engine_with_long_steps_may_be_silent_for_longer(make: Callable[..., World]) -> None:
    async def test() -> None:
        world = make()
        replica = world.replica
        world.now += 50
        assert not replica.is_late(1), "nobody has asked"
        replica.ping()
        world.now += 2
        replica.ping()
        assert (replica.silence, replica.is_late(1), replica.is_late(2)) == (2, True, False)
        assert world.engine.sent == [Ping()], "one is enough"
        await world.tell(Pong())
        assert replica.silence == 0
        replica.ping()
        world.now += 5.9
        assert not replica.is_late(1), "its steps may take 2 seconds"
        world.now += 0.2
        assert replica.is_late(1)
        assert not replica.is_late(10)

    run(test)


def test_long_silences_fade_and_end_with_the_engine(make: Callable[..., World]) -> None:
    async def test() -> None:
        world = make(restart_delay=0.0)
        await world.be_silent(10)
        await world.be_silent(0.1)
        world.replica.ping()
        world.now += 25
        assert not world.replica.is_late(1), "one short silence says little"
        await world.tell(Pong())
        for _ in range(300):
            await world.be_silent(0.1)
        world.replica.ping()
        world.now += 2
        assert world.replica.is_late(1)
        await world.tell(Pong())
        await world.be_silent(10)
        await world.tell(None)
        await until(lambda: world.engine.starts == 1)
        await world.tell(Loaded(NUMERICS, b""))
        world.replica.ping()
        world.now += 2
        assert world.replica.is_late(1)

    run(test)


def test_only_tokens_are_answers_and_a_dead_engine_has_none(make: Callable[..., World]) -> None:
    async def test() -> None:
        world = make(restart_delay=1000.0)
        replica, load = world.replica, EngineLoad(2, 1, 0.5)
        silent = SimpleNamespace(token_ids=[])
        await world.tell(EngineUpdate(1.0, [silent], {}, load, {}))  # type: ignore[list-item]
        assert (replica.answered_at, replica.load) == (None, load)
        told = SimpleNamespace(token_ids=[5])
        await world.tell(EngineUpdate(2.0, [told], {}, load, {}))  # type: ignore[list-item]
        assert replica.answered_at == 2.0
        await world.tell(None)
        assert (replica.answered_at, replica.load, replica.state) == (None, IDLE, EngineState.STARTING)
        assert (replica.pid, world.engine.ends) == (None, 1)

    run(test)


def test_an_engine_that_was_stopped_is_not_heard_or_started_any_more(make: Callable[..., World]) -> None:
    async def test() -> None:
        world = make(restart_delay=0.02)
        await world.tell(None)
        assert world.replica.restart_in is not None
        await world.replica.stop()
        assert (world.replica.restart_in, world.replica.state) == (None, EngineState.STOPPED)
        heard = len(world.heard)
        await world.tell(Loaded(NUMERICS, b""))
        await asyncio.sleep(0.05)
        assert (len(world.heard), world.replica.state, world.engine.starts) == (heard, EngineState.STOPPED, 0)

    run(test)


def test_an_engine_that_is_started_again_has_its_whole_time_to_load(make: Callable[..., World]) -> None:
    async def test() -> None:
        world = make(restart_delay=0.0)
        world.now += 1000
        await world.tell(None)
        await until(lambda: world.engine.starts == 1)
        assert world.replica.started_at == world.now

    run(test)
