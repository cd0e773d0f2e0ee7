"""Fleets of fake engines, which say what a test makes them say."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from soothsay.core.answer import FinishReason, SpeculationStats, TokenLogprobs
from soothsay.core.engine_load import EngineLoad
from soothsay.core.numerics import Numerics
from soothsay.core.params import SamplingParams
from soothsay.server.engines.engine_messages import (
    Admitted,
    AnswerUpdate,
    Cancel,
    CatchUp,
    EmittedTokens,
    EngineUpdate,
    Loaded,
    LoadedModel,
    Ping,
    Pong,
    RequestOptions,
    Submit,
)
from soothsay.server.fleet.engine_fleet import Bounds, Fleet
from soothsay.server.fleet.engine_loop import EngineLoop
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica import Replica
from soothsay.server.fleet.server_metrics import Metrics
from soothsay.server.server_config import ServerConfig

NUMERICS = Numerics("native, avx2", 100, "0123")
MODEL = LoadedModel(None, 100, 100, 8, 16, 50, "none", ("none",))


def token(job: Job, index: int, position: int) -> int:
    """What an answer has at a position, at any engine: a function of the job alone, as the guarantee says."""
    return (7 * sum(job.prompts[0]) + 3 * index + position * position) % 90


def tokens(job: Job, count: int, index: int = 0) -> list[int]:
    """The first tokens of an answer."""
    return [token(job, index, position) for position in range(count)]


def text(tokens: list[int]) -> str:
    """The text of some tokens: each has none, one or two characters."""
    return "".join("xy"[: one % 3] for one in tokens)


class FakeEngine:
    """Has the members of an `Engine`. `fail_starts` is how often it cannot start."""

    def __init__(self) -> None:
        self.pid, self.exit_code = 1, -9
        self.sent: list[Any] = []
        self.starts = self.fail_starts = self.kills = self.ends = 0
        self.tell: Callable[[Any], None] = lambda _: None
        self.stats: dict[tuple[int, int], SpeculationStats] = {}
        self.said: dict[tuple[int, int], int] = {}
        self.ended: set[tuple[int, int]] = set()
        self.deaf = False

    def start(self) -> None:
        if self.fail_starts:
            self.fail_starts -= 1
            raise OSError("no room")
        self.starts += 1

    def wait(self) -> Loaded:
        return Loaded.of(MODEL, NUMERICS)

    def listen(self, receive: Callable[[Any], None]) -> None:
        self.tell = receive

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Ping) and not self.deaf:
            self.tell(Pong())
        if isinstance(message, CatchUp) and self.has_ended(message.job):
            self.tell(EngineUpdate(1.0, [], {message.job: None}, EngineLoad(0, 0, 0.1), {}))

    def kill(self) -> None:
        self.kills += 1
        self.tell(None)

    def end(self) -> None:
        self.ends += 1

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    def has(self, job: Job) -> bool:
        """Whether it has got a job that was not taken from it."""
        gone = [message.job for message in self.sent if isinstance(message, Cancel)]
        submit = self.submit_of(job)
        return submit is not None and submit.job not in gone

    def submit_of(self, job: Job) -> Submit | None:
        """The last call for a job. Prompts tell jobs apart."""
        return next((one for one in reversed(self.submits) if one.prompts == job.prompts), None)

    def die(self) -> None:
        self.stats.clear(), self.said.clear(), self.ended.clear()
        self.tell(None)

    def load(self, numerics: Numerics = NUMERICS) -> None:
        self.tell(Loaded(numerics, b"nobody reads it"))

    def admit(self, job: Job) -> None:
        submit = self.submit_of(job)
        assert submit is not None
        assert submit.params.seed is not None
        self.tell(Admitted(submit.job, [submit.params.seed + i for i in range(submit.params.n)]))

    def position(self, job: Job, index: int = 0) -> int:
        """Tokens of an answer that it knows."""
        submit = self.submit_of(job)
        assert submit is not None
        known = [len(said[index].tokens) for said in self.told(submit.job)]
        return max([self.said.get((submit.job, index), 0), *known])

    def told(self, call: int) -> list[Sequence[EmittedTokens]]:
        """What it was told of a job's answers."""
        told = [one for one in self.sent if isinstance(one, Submit | CatchUp) and one.job == call]
        return [one.emitted for one in told if one.emitted]

    def has_ended(self, call: int) -> bool:
        """Whether all answers of a job have ended, here or elsewhere."""
        (submit,) = [one for one in self.submits if one.job == call]
        return all(
            (call, index) in self.ended or any(said[index].ended for said in self.told(call))
            for index in range(submit.params.n)
        )

    def say(self, job: Job, count: int = 1, index: int = 0, *, end: bool = False) -> None:
        """Emit the next tokens of an answer, as a real engine would; `end`: it has ended then."""
        submit, at = self.submit_of(job), self.position(job, index)
        assert submit is not None
        new = [token(job, index, position) for position in range(at, at + count)]
        key = submit.job, index
        self.said[key] = at + count
        self.ended |= {key} if end else set()
        ended = {submit.job: None} if end and self.has_ended(submit.job) else {}
        stats = self.stats.setdefault(key, SpeculationStats())
        stats.record(count - 1, count - 1, ["suffix"] * (count - 1), count)
        wanted = submit.params.logprobs is not None
        update = AnswerUpdate(
            job=submit.job,
            index=index,
            text=text(new),
            logprobs=[TokenLogprobs(one, -one / 10, {}) for one in new] if wanted else None,
            traces=[],
            num_output=at + count,
            text_length=len(text([token(job, index, position) for position in range(at + count)])),
            num_cached=0,
            num_preemptions=0,
            stats=stats.plus(SpeculationStats()),
            finish_reason=FinishReason.LENGTH if end else None,
            token_ids=new,
        )
        self.tell(EngineUpdate(1.0, [update], ended, EngineLoad(0 if ended else 1, 0, 0.1), {"none": 1}))


class Fixture:
    """A server's loop with a fleet of fake engines. All but the first have these numerics.

    A drained engine has no time for its answers, unless the options say so.
    """

    def __init__(self, size: int | Bounds = 1, numerics: Numerics = NUMERICS, **options: Any):
        self.engines: list[FakeEngine] = []
        self.fleet = Fleet(self._make, size).__enter__()
        self.metrics = Metrics("m")
        self.loop = EngineLoop(self.fleet, self.metrics, ServerConfig(name="m", **{"drain": 0.0, **options}))
        self.loop.start()
        for engine in self.engines[1:]:
            engine.load(numerics)

    def _make(self) -> FakeEngine:
        self.engines.append(FakeEngine())
        return self.engines[-1]

    @property
    def replicas(self) -> list[Replica]:
        return self.fleet.replicas

    async def ready(self) -> None:
        """Wait until all engines serve, and have answered once."""
        await until(lambda: len(self.fleet.jobs.serving) == len(self.engines))
        for replica in self.replicas:
            replica.answered_at = 0.0

    async def begin(self, one: Job) -> FakeEngine:
        """Submit a job. Returns the engine that has it."""
        submitted = asyncio.create_task(self.loop.submit(one))
        await until(lambda: self.holders(one))
        (engine,) = self.holders(one)
        engine.admit(one)
        await submitted
        return engine

    def holders(self, one: Job) -> list[FakeEngine]:
        return [engine for engine in self.engines if engine.has(one)]


PROMPTS = itertools.count(1)


def job(prompt: list[int] | None = None, *, counted: bool = True, session: str = "", **params: Any) -> Job:
    prompt = [next(PROMPTS)] if prompt is None else prompt
    options = RequestOptions(session=session)
    return Job([prompt], SamplingParams(**{"seed": 0, **params}), options, "none", 60, counted=counted)


async def heard(one: Job) -> dict[int, tuple[list[int], str]]:
    """The tokens and the text of each answer of a job, once it has ended."""
    answers: dict[int, tuple[list[int], str]] = {i: ([], "") for i in range(one.size)}
    async for update in one:
        known, before = answers[update.index]
        answers[update.index] = [*known, *update.token_ids], before + update.text
        assert update.num_output == len(known) + len(update.token_ids)
        if update.logprobs is not None:
            assert [logprob.token for logprob in update.logprobs] == update.token_ids
    return answers


async def until(true: Callable[[], object]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not happened")


LOOP: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
"""Makes the event loop of `run`. The fixture `each_loop` sets it."""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=LOOP) as runner:
        runner.run(test())
