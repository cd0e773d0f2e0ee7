"""A job: the answers that one HTTP request asks for, how far each is, and the engines that work on it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from soothsay.core.answer import SpeculationStats
from soothsay.core.numerics import Numerics
from soothsay.core.params import SamplingParams
from soothsay.server.access.accounts import Charge
from soothsay.server.engines.engine_messages import AnswerUpdate, EmittedTokens, RequestOptions, Submit
from soothsay.server.fleet.replica import Replica
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
        lengths = [len(prompt) for prompt in prompts for _ in range(params.n)]
        self.answers = [AnswerProgress(length, self.arrived_at) for length in lengths]
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


NOTHING = AnswerUpdate(-1, 0, "", None, [], 0, 0, 0, 0, SpeculationStats(), None)
"""What has been said of an answer before its first update."""


class Flight:
    """A job, its answers so far, and the engines that work on it.

    The `runner` is the engine whose tokens the client gets. A `successor` has got the job too, with the
    tokens so far. It reads them, then those that the runner has added meanwhile, and takes over. An answer is
    a function of the job, so its tokens, text and log-probabilities go on exactly where the runner was.

    Args:
        submit: the job. If it has no seed, it gets one here, since the next engine needs the same.
        pinned: whether it belongs to its first engine and ends with it.
    """

    def __init__(self, submit: Submit, *, pinned: bool = False):
        params = submit.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(48))
        self.submit = replace(submit, params=params)
        self.number, self.pinned = submit.job, pinned
        self.numerics: Numerics | None = None  # of the engine that said the first token
        self.runner: Replica | None = None
        self.successor: Replica | None = None
        self.losses = 0  # engines that died under it
        self.idle_losses = 0  # the same, since its last new token
        self.num_calls = 0  # how often an engine got it
        self.calls: dict[Replica, int] = {}  # the job's number at each engine that has it
        self.size = len(submit.prompts) * params.n  # number of answers
        self._told = [NOTHING] * self.size  # of each answer: the last update that the client has got
        self._tokens: list[list[int]] = [[] for _ in self._told]  # that the client has got
        self._goals: list[int] | None = None  # tokens of each answer when the successor first said one
        # the last updates of engines whose totals are not those of the answers
        self._heard: dict[Replica, list[AnswerUpdate]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the client has heard of any answer."""
        return any(told is not NOTHING for told in self._told)

    @property
    def has_ended(self) -> bool:
        """Whether the client has got the end of every answer."""
        return all(told.finish_reason is not None for told in self._told)

    @property
    def texts(self) -> list[list[int]]:
        """The token ids of each prompt with its answer so far."""
        prompts, n = self.submit.prompts, self.submit.params.n
        return [prompts[i // n] + tokens for i, tokens in enumerate(self._tokens)]

    @property
    def emitted(self) -> list[EmittedTokens]:
        """What the client has got of each answer."""
        told = zip(self._tokens, self._told, strict=True)
        return [EmittedTokens([*tokens], one.finish_reason is not None) for tokens, one in told]

    def board(self, engine: Replica, call: int) -> Submit:
        """Give the job to an engine, the successor if there is a runner. Returns what to send.

        Args:
            engine: does not have the job.
            call: the job's number there. Late news of an earlier call must not count, so it is a new one.
        """
        self.calls[engine] = call
        self.num_calls += 1
        if self.runner is None:
            self.runner = engine
        else:
            self.successor = engine
            self._heard.setdefault(self.runner, [*self._told])
        if self.successor is not None or self.has_begun:
            self._heard[engine] = [NOTHING] * self.size
        emitted = self.emitted if self.has_begun else ()
        return replace(self.submit, job=call, emitted=emitted)

    def leave(self, engine: Replica) -> None:
        """Note that an engine does not work on the job any more. A successor becomes the runner."""
        self._heard.pop(engine, None)
        self.calls.pop(engine, None)
        self._goals = None
        if engine == self.successor:
            self.successor = None
        elif engine == self.runner:
            self.runner, self.successor = self.successor, None

    def may_take_over(self, update: AnswerUpdate) -> bool:
        """Whether the successor should take over with this update.

        With its first token it has read what it was sent, but the runner may be far ahead by then. So the
        successor first reads what the client had at this time. Meanwhile the runner continues.
        """
        if self._goals is None:
            self._goals = [*map(len, self._tokens)]
        return update.num_output > self._goals[update.index]

    def lose(self, engine: Replica) -> None:
        """Note that an engine has died."""
        self.leave(engine)
        self.losses += 1
        self.idle_losses += 1

    def take(self, engine: Replica, update: AnswerUpdate) -> AnswerUpdate | None:
        """Take an update of the runner. Returns what of it is new to the client; None: nothing."""
        new: AnswerUpdate | None = update
        if engine in self._heard:  # else it has said all that the client has heard
            heard = self._heard[engine]
            new, heard[update.index] = self._new(heard[update.index], update), update
        if new is not None:
            new = new if new.job == self.number else replace(new, job=self.number)
            self._told[new.index] = new
            self._tokens[new.index] += new.token_ids
            self.idle_losses = 0
        return new

    def _new(self, heard: AnswerUpdate, update: AnswerUpdate) -> AnswerUpdate | None:
        """What of an update the client has not heard, with the totals of all engines together."""
        told, num_told = self._told[update.index], len(self._tokens[update.index])
        ends = update.finish_reason is not None and told.finish_reason is None
        if update.num_output <= num_told and not ends:
            return None
        skipped = num_told - (update.num_output - len(update.token_ids))
        skipped_text = told.text_length - (update.text_length - len(update.text))
        return replace(
            update,
            text=update.text[skipped_text:],
            token_ids=update.token_ids[skipped:],
            logprobs=None if update.logprobs is None else update.logprobs[skipped:],
            prompt_logprobs=None if num_told else update.prompt_logprobs,
            num_cached=told.num_cached if num_told else update.num_cached,
            num_preemptions=told.num_preemptions + update.num_preemptions - heard.num_preemptions,
            stats=told.stats.plus(update.stats.minus(heard.stats)),
        )
