"""A job: the answers that one HTTP request asks for, and how far each of them is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from soothsay.core.answer import SpeculationStats
from soothsay.core.params import SamplingParams
from soothsay.server.access.accounts import Charge
from soothsay.server.engines.engine_messages import AnswerUpdate, RequestOptions
from soothsay.server.http.api_errors import ApiError

T = TypeVar("T")


@dataclass(slots=True)
class AnswerProgress:
    """How far one answer is, as of its last update."""

    num_prompt: int  # tokens of its prompt
    updated_at: float  # time of the last update, or of arrival; from `time.monotonic`
    first_at: float | None = None  # time of the first update that has tokens
    seed: int = 0
    num_output: int = 0  # tokens of the answer
    num_cached: int = 0  # tokens of the prompt that the prefix cache had
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def take(self, update: AnswerUpdate, at: float) -> None:
        """Take over the totals of an update."""
        if self.first_at is None and update.num_output:
            self.first_at = at
        self.num_output, self.num_cached, self.stats = update.num_output, update.num_cached, update.stats
        self.updated_at = at


class Job:
    """The answers that one HTTP request asks for. Iterating yields their updates. Iterate only once.

    Create it within the event loop: the timeout begins then.

    Args:
        prompts: token ids of at least one prompt. Each prompt gets `params.n` answers.
        params: how to sample all of the answers.
        options: the drafter, the priority, and the like.
        drafter: the drafter's name, for metrics and the log.
        timeout: seconds until the last answer must have ended.
        counted: whether a user asked for it, so that limits and metrics count it.
        charge: what the key is charged for the job; None: nothing.

    Iterating raises `ApiError` if the answers fail or the time is up.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        options: RequestOptions,
        drafter: str,
        timeout: float,
        charge: Charge | None = None,
        *,
        counted: bool = True,
    ):
        self.number = -1  # set by `EngineLoop.submit`
        self.prompts, self.params, self.options = list(prompts), params, options
        self.drafter = drafter
        self.counted = counted
        self.charge = charge or Charge(None, 0, 0)
        loop = asyncio.get_running_loop()
        self.arrived_at = time.monotonic()
        self._deadline = loop.time() + timeout
        self.answers = [
            AnswerProgress(len(prompt), self.arrived_at) for prompt in prompts for _ in range(params.n)
        ]
        self.reports: dict[str, Any] = {}  # what was reported of its present state, by name
        self.admitted: asyncio.Future[None] = loop.create_future()
        self._updates: asyncio.Queue[AnswerUpdate | None] = asyncio.Queue()  # None: the job has ended
        self._failure: ApiError | None = None

    @property
    def size(self) -> int:
        """Number of answers."""
        return len(self.answers)

    @property
    def num_output(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.num_output for answer in self.answers)

    async def __aiter__(self) -> AsyncIterator[AnswerUpdate]:
        while (update := await self.in_time(self._updates.get())) is not None:
            yield update
        if self._failure is not None:
            raise self._failure

    async def in_time(self, waiting: Awaitable[T]) -> T:
        """Await something. Raises `ApiError` if the job's deadline comes first."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await waiting
        except TimeoutError:
            raise ApiError(504, "the answer took longer than this server allows", "timeout") from None

    def admit(self, seeds: Sequence[int]) -> None:
        """Note that the engine has taken the job, and the seed of each answer."""
        for answer, seed in zip(self.answers, seeds, strict=True):
            answer.seed = seed
        if not self.admitted.done():  # the deadline may have cancelled it
            self.admitted.set_result(None)

    def push(self, update: AnswerUpdate) -> None:
        """Add an update for whoever iterates."""
        self.reports.clear()
        self._updates.put_nowait(update)
        self.charge.grow(update.index, update.num_output)

    def finish(self, failure: ApiError | None) -> None:
        """End the job: iterating stops after the updates so far, or then raises `failure`."""
        self.charge.end(refund=failure is not None)
        self._failure = failure
        if not self.admitted.done():
            if failure is None:
                self.admitted.cancel()
            else:
                self.admitted.set_exception(failure)
        self._updates.put_nowait(None)
