"""Decides when requests are sent: in a closed loop, in an open loop, or in bursts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal

from soothsay.errors import RequestError

PAUSE = 0.2
"""Seconds that a client waits after a failure, so that it does not flood a server that fails at once."""

Kind = Literal["concurrency", "rate", "burst"]

Send = Callable[[int, float], Awaitable[bool]]
"""Runs conversation `number`, due at a time of the loop's clock. Returns whether all requests succeeded."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A load: how conversations arrive.

    - "concurrency": a closed loop of `level` clients. Each starts a conversation when its last one ends.
    - "rate": an open loop of `level` conversations a second on average, a Poisson process. It does not wait
      for the server.
    - "burst": `level` conversations at once, and the next ones when all have ended.
    """

    kind: Kind
    level: float
    requests: int | None = None  # number of conversations
    duration: float | None = None  # seconds in which conversations begin; all of them are completed

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.duration is None):
            raise RequestError("a load has a number of requests or a duration, and not both")
        if not (self.requests or self.duration or 0) > 0:
            raise RequestError("a load needs at least one request, or a duration above zero")
        if not 0 < self.level < math.inf or (self.kind != "rate" and self.level % 1):
            wanted = "above zero" if self.kind == "rate" else "a whole number, 1 or more"
            raise RequestError(f"{self.kind} {self.level:g} is not possible: it must be {wanted}")

    @property
    def name(self) -> str:
        """The load's name in reports, such as "concurrency 16"."""
        unit = "/s" if self.kind == "rate" else ""
        return f"{self.kind} {self.level:g}{unit}"

    async def run(self, send: Send, seed: str) -> None:
        """Send conversations 0, 1, 2, ... and wait until all have ended.

        Args:
            send: see `Send`. It must not raise.
            seed: seed of the arrival times of "rate".
        """
        begin = asyncio.get_running_loop().time()
        match self.kind:
            case "concurrency":
                await self._closed(send, begin)
            case "rate":
                await self._poisson(send, begin, random.Random(seed))
            case "burst":
                await self._bursts(send, begin)

    def _numbers(self, begin: float) -> Iterator[int]:
        """Yield numbers of conversations until there are enough or the time is over."""
        clock = asyncio.get_running_loop().time
        for number in count() if self.requests is None else range(self.requests):
            if self.duration is not None and clock() - begin >= self.duration:
                return
            yield number

    async def _closed(self, send: Send, begin: float) -> None:
        numbers = self._numbers(begin)
        clock = asyncio.get_running_loop().time

        async def client() -> None:
            due = begin
            for number in numbers:  # all clients take from one iterator
                if not await send(number, due):
                    await asyncio.sleep(PAUSE)
                due = clock()

        async with asyncio.TaskGroup() as group:
            for _ in range(int(self.level)):
                group.create_task(client())

    async def _poisson(self, send: Send, begin: float, rng: random.Random) -> None:
        clock = asyncio.get_running_loop().time
        due = begin
        async with asyncio.TaskGroup() as group:
            for number in count() if self.requests is None else range(self.requests):
                due += rng.expovariate(self.level)
                if self.duration is not None and due - begin >= self.duration:
                    return
                await asyncio.sleep(due - clock())
                group.create_task(_whole(send, number, due))

    async def _bursts(self, send: Send, begin: float) -> None:
        clock = asyncio.get_running_loop().time
        numbers = self._numbers(begin)
        while burst := list(islice(numbers, int(self.level))):
            due = clock()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_whole(send, number, due)) for number in burst]
            if not any(task.result() for task in tasks):
                await asyncio.sleep(PAUSE)


async def _whole(send: Send, number: int, due: float) -> bool:
    return await send(number, due)
