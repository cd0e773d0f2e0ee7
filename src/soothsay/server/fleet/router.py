"""Which engine gets a job: the one with the least work before the job's first token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

ANSWER = 64
"""What an answer under way costs a newcomer, in tokens of a prompt that it would have to read. A step's time
is shared by all its answers."""

SESSION = 2 * ANSWER
"""How many tokens a job may read more to stay at the engine that had the session's last job. That engine's
drafters have seen its texts."""

MAX_SESSIONS = 4096
"""Limit of sessions that are remembered."""

E = TypeVar("E", bound=Hashable)


class Router(Generic[E]):
    """Chooses engines by what they have read, how busy they are, and the session.

    The cost of an engine is the number of the prompt's tokens that its prefix cache lacks, plus `ANSWER` for
    each answer under way, less `SESSION` if it had the session's last job. The engine with the least cost
    gets the job. Between engines of equal cost, the one that has waited longest for a job gets it.

    The router knows prefix caches by what it has sent: it keeps the digests of the last blocks of each
    engine, as many as the engine's cache holds. Digests include the tenant, so a tenant's texts attract no
    others.

    Args:
        block_size: tokens in a block.
        capacity: blocks that an engine's cache holds.
    """

    def __init__(self, block_size: int, capacity: int):
        self._block_size, self._capacity = block_size, capacity
        self._held: dict[E, OrderedDict[bytes, None]] = {}  # the least recently used digest first
        self._sessions: OrderedDict[Hashable, E] = OrderedDict()
        self._turns: dict[E, int] = {}  # the number of each engine's last job
        self._num_jobs = 0

    def choose(
        self,
        answers: Mapping[E, int],
        prompts: Collection[tuple[int, Sequence[bytes]]],
        session: Hashable | None = None,
    ) -> E:
        """Choose one of the engines that can serve a job.

        Args:
            answers: the number of answers under way, by engine. Not empty.
            prompts: the length and the digests of each of the job's prompts.
            session: of the job; None: it has none.
        """
        last = None if session is None else self._sessions.get(session)

        def cost(engine: E) -> float:
            unread = sum(length - self.hit(engine, digests) for length, digests in prompts)
            return unread + ANSWER * answers[engine] - SESSION * (engine == last)

        chosen = min(answers, key=lambda engine: (cost(engine), self._turns.get(engine, 0)))
        self._num_jobs += 1
        self._turns[chosen] = self._num_jobs
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def hit(self, engine: E, digests: Sequence[bytes]) -> int:
        """Number of leading tokens that an engine's cache should have."""
        held = self._held.get(engine) or OrderedDict[bytes, None]()
        count = next((i for i, digest in enumerate(digests) if digest not in held), len(digests))
        return count * self._block_size

    def note(self, engine: E, digests: Sequence[bytes]) -> None:
        """Note that an engine's cache has got these blocks, of one text, the first block first."""
        held = self._held.setdefault(engine, OrderedDict())
        for digest in reversed(digests):  # the last blocks of a prefix are dropped first
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def forget(self, engine: E) -> None:
        """Note that an engine's cache is empty, because the engine has ended."""
        self._held.pop(engine, None)
        self._turns.pop(engine, None)
