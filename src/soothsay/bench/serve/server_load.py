"""The load of `soothsay bench serve`: which conversations are sent, and when."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

from soothsay.bench.chat_client import now
from soothsay.bench.journal import short_hash
from soothsay.bench.prompts import TOPICS, read_prompts
from soothsay.errors import RequestError
from soothsay.tokenizer import Message

PAUSE = 0.2
"""Seconds that a client waits after a failure, so that it does not flood a server that fails at once."""

Kind = Literal["concurrency", "rate", "burst"]

Send = Callable[[int, float], Coroutine[Any, Any, bool]]
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
        match self.kind:
            case "concurrency":
                await self._closed(send, now())
            case "rate":
                await self._poisson(send, now(), random.Random(seed))
            case "burst":
                await self._bursts(send, self._numbers(now()))

    def _numbers(self, begin: float) -> Iterator[int]:
        """Yield numbers of conversations until there are enough or the time is over."""
        for number in count() if self.requests is None else range(self.requests):
            if self.duration is not None and now() - begin >= self.duration:
                return
            yield number

    async def _closed(self, send: Send, begin: float) -> None:
        numbers = self._numbers(begin)

        async def client() -> None:
            due = begin
            for number in numbers:  # all clients take from one iterator
                if not await send(number, due):
                    await asyncio.sleep(PAUSE)
                due = now()

        async with asyncio.TaskGroup() as group:
            for _ in range(int(self.level)):
                group.create_task(client())

    async def _poisson(self, send: Send, begin: float, rng: random.Random) -> None:
        due = begin
        async with asyncio.TaskGroup() as group:
            for number in count() if self.requests is None else range(self.requests):
                due += rng.expovariate(self.level)
                if self.duration is not None and due - begin >= self.duration:
                    return
                await asyncio.sleep(due - now())
                group.create_task(send(number, due))

    async def _bursts(self, send: Send, numbers: Iterator[int]) -> None:
        while burst := list(islice(numbers, int(self.level))):
            due = now()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(number, due)) for number in burst]
            if not any(task.result() for task in tasks):
                await asyncio.sleep(PAUSE)


REQUESTS = (
    "Tell me a story about {topic}.",
    "Write a poem about {topic}, in four verses.",
    "Explain {topic} to a child of eight, in a few sentences.",
    "Name ten facts about {topic}, one a line, each with a number.",
    "Write a Python class that represents {topic}, with a method that describes it, and show how it is used.",
    "Translate into German: the children talked about {topic} all day, and then they drew pictures.",
    "Write a letter to a newspaper about {topic}, with three reasons to care.",
    "A shop sells {topic} for 7 dollars a dozen. Work out, step by step, what 60 of them cost.",
)
"""What the default conversations ask; they differ in how well they can be drafted."""


@dataclass(frozen=True, slots=True)
class UserTurns:
    """The user's side of a conversation; the server gives the answers."""

    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()  # messages before the first turn


def default_conversations() -> list[UserTurns]:
    """Return 256 conversations: eight short requests, all about one of 32 topics. No two begin alike."""
    return [
        UserTurns(tuple(text.format(topic=topic) for text in (*REQUESTS[first:], *REQUESTS[:first])))
        for topic in TOPICS.split()
        for first in range(len(REQUESTS))
    ]


def read_conversations(path: Path) -> list[UserTurns]:
    """Read a file of prompts; see `soothsay.bench.prompts.read_prompts`.

    A conversation goes on from the user's last message. A text is the message of a user.

    Raises `RequestError` for other files, and for a conversation without a message of the user.
    """
    conversations = []
    for entry in read_prompts(path):
        messages = entry.messages
        spoken = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not spoken:
            raise RequestError(f"{path}, prompt {entry.id}: no message is the user's")
        turns = messages[spoken[-1]]["content"], *entry.later
        conversations.append(UserTurns(turns, messages[: spoken[-1]]))
    return conversations


class Mix:
    """An endless sequence of conversations, determined by the arguments.

    All conversations come once, in an order drawn with the seed, before the first comes again.

    Args:
        conversations: at least one. Their words, in the order given, also make the long texts.
        seed: seed of the order, and of the choice of long prompts.
        turns: largest number of turns of a conversation.
        shared_prefix: number of words of a system message that all conversations have.
        long_share: share of conversations that begin with a long text. The texts differ.
        long_words: number of words of a long text.
    """

    def __init__(
        self,
        conversations: Sequence[UserTurns],
        seed: int = 0,
        turns: int = 1,
        shared_prefix: int = 0,
        long_share: float = 0.0,
        long_words: int = 1000,
    ):
        self._seed, self._turns, self._order = seed, turns, list(conversations)
        self._long_share, self._long_words = long_share, long_words
        self._words = list(chain.from_iterable(turn.split() for one in conversations for turn in one.turns))
        self._prefix = self._passage(0, shared_prefix)
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        """Return the number of different conversations."""
        return len(self._order)

    def __getitem__(self, index: int) -> UserTurns:
        """Return the conversation at a place, 0 or above."""
        one = self._order[index % len(self._order)]
        first, *later = one.turns[: self._turns]
        rng = random.Random(f"{self._seed} {index}")
        if rng.random() < self._long_share:
            first = f"{self._passage(rng.randrange(len(self._words)), self._long_words)}\n\n{first}"
        before = list(one.before)
        if self._prefix:
            own = before.pop(0)["content"] if before and before[0]["role"] == "system" else ""
            before.insert(0, {"role": "system", "content": f"{self._prefix}\n\n{own}".rstrip()})
        return UserTurns((first, *later), tuple(before))

    @property
    def digest(self) -> str:
        """A short hash of all that the mix is made of."""
        said = [(one.before, one.turns[: self._turns]) for one in self._order]
        facts = (said, self._prefix, self._long_share, self._long_words, self._seed)
        return short_hash(json.dumps(facts))

    def _passage(self, begin: int, words: int) -> str:
        """Return `words` words from word `begin` on, cyclically."""
        return " ".join(self._words[(begin + i) % len(self._words)] for i in range(words))
