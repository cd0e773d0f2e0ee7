"""`soothsay bench serve`: servers take turns under the same load, with the same questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from soothsay.bench.bench_plans import ServeOptions
from soothsay.bench.chat_client import ChatClient, ChatError, now
from soothsay.bench.journal import conditions
from soothsay.bench.measure import Meter, Progress, rotated
from soothsay.bench.prompts import QUESTION
from soothsay.bench.serve.serve_results import LoadResults, Sample, Trial
from soothsay.bench.serve.server_load import Arrivals, Mix
from soothsay.errors import RequestError
from soothsay.tokenizer import Message

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server under test.

    Args:
        name: the server's name in reports.
        client: its client. The model "" means the only model that the server has.
        body: further fields of each request.
    """

    name: str
    client: ChatClient
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadPlan(ServeOptions):
    """What to measure: `loads`, one after the other in each round."""

    loads: Sequence[Arrivals]


class ServeBench:
    """Measures what a plan says.

    Args:
        targets: servers with different names. Ratios are over the first.
        mix: the conversations. A trial repeats one only when all have been sent.
        plan: what to measure.
        path: the file for results; an existing file with the same conditions is continued, also with more
            rounds.
        progress: see `Progress`.

    Raises:
        RequestError: two targets or two loads have the same name, or there are none.
        SoothsayError: the file has other conditions.
    """

    def __init__(
        self,
        targets: Sequence[LoadTarget],
        mix: Mix,
        plan: LoadPlan,
        path: Path | None = None,
        progress: Progress = lambda *_: None,
    ):
        for what, named in (("targets", targets), ("loads", plan.loads)):
            names = [one.name for one in named]
            if not names or len({*names}) < len(names):
                raise RequestError(f"{what} need names of their own, and at least one; there are {names}")
        self.targets, self.mix, self.plan = targets, mix, plan
        self.meter = _LoadMeter(progress)
        self.results = LoadResults(self._conditions(), path)

    async def run(self) -> LoadResults:
        """Measure what is not in the file yet. If it is cancelled, answers so far are kept.

        Raises `SoothsayError` if a target cannot be reached, does not have the model, or does not answer the
        warm-up.
        """
        plan = self.plan
        order = [
            (number, load, target)
            for number in range(1, plan.rounds + 1)
            for turn, load in enumerate(plan.loads)
            for target in rotated(self.targets, number - 1 + turn)
        ]
        lacking = [one for one in order if (one[2].name, one[1].name, one[0]) not in self.results]
        for target in self.targets:
            if any(target is other for _, _, other in lacking):
                await self._prepare(target)
        self.meter.total = sum(_size(load) for _, load, _ in lacking)
        self.meter.advance()
        for number, load, target in lacking:
            await self._trial(target, load, number)
        return self.results

    async def _prepare(self, target: LoadTarget) -> None:
        """Check the target's model, and warm the target up."""
        client = target.client
        await client.choose_model(target.name)
        conversation: list[Message] = [{"role": "user", "content": QUESTION}]
        body = {**self.body(target, conversation, 0), "max_tokens": WARM_UP_TOKENS}
        await client.ask(body)  # also finds the optional fields that the server refuses
        if self.plan.warm_up > 1:
            await asyncio.gather(*(client.ask(body) for _ in range(self.plan.warm_up - 1)))

    async def _trial(self, target: LoadTarget, load: Arrivals, number: int) -> None:
        first = self.results.begin(load.name, number)
        user, cpu = _User(self, target, first), time.process_time()

        def trial(seconds: float, *, whole: bool) -> Trial:
            key, used = (target.name, load.name, load.level, number), time.process_time() - cpu
            refused = list(target.client.refused)
            return Trial(*key, first, user.begun, seconds, used, whole, refused, user.samples)

        self.meter.begin_trial(load)
        try:
            await load.run(user.send, f"{self.plan.seed} {number}")
        except asyncio.CancelledError:
            self.results.add(trial(now() - user.begin, whole=False))
            raise
        last = max((sample.sent + sample.end for sample in user.samples), default=0.0)
        self.results.add(trial(max(last, load.duration or 0.0), whole=True))
        self.meter.end_trial(load)

    def body(self, target: LoadTarget, messages: Sequence[Message], number: int) -> dict[str, Any]:
        """The fields of a request: conversation `number`, up to the user's turn."""
        own = {"max_tokens": self.plan.max_tokens, "temperature": self.plan.temperature}
        return {"messages": list(messages), **own, "seed": self.plan.seed + number, **target.body}

    def _conditions(self) -> dict[str, Any]:
        return conditions(
            *(self.plan, "warm_up", "max_tokens", "temperature", "seed"),
            targets=[target.name for target in self.targets],
            urls=[target.client.place + target.client.url.path for target in self.targets],
            bodies=[{**target.client.optional, **target.body} for target in self.targets],
            mix=self.mix.digest,
            conversations=len(self.mix),
            loads=[[one.name, one.requests, one.duration] for one in self.plan.loads],
        )


class _User:
    """Runs the conversations of a trial, from number `first` of the mix on, and keeps the samples."""

    def __init__(self, bench: ServeBench, target: LoadTarget, first: int):
        self._bench, self._target, self._first = bench, target, first
        self.begin, self.begun = now(), 0
        self.samples: list[Sample] = []

    async def send(self, number: int, due: float) -> bool:
        """Run a conversation until its end or its first failure. Returns whether all requests succeeded."""
        self.begun = max(self.begun, number + 1)
        place = self._first + number
        conversation = self._bench.mix[place]
        messages, tokens = list(conversation.before), 0
        try:
            for turn, said in enumerate(conversation.turns):
                messages.append({"role": "user", "content": said})
                sample, text = await self._ask(self._bench.body(self._target, messages, place), due)
                self.samples.append(replace(sample, number=number, turn=turn))
                tokens += sample.tokens
                if sample.error:
                    return False
                messages.append({"role": "assistant", "content": text})
                due = now()
        finally:
            self._bench.meter.end_conversation(tokens)
        return True

    async def _ask(self, body: Mapping[str, Any], due: float) -> tuple[Sample, str]:
        """Send a request. Returns its sample, without number and turn, and the text of the answer."""
        sent = now()
        sample = Sample(0, 0, _rounded(due - self.begin), _rounded(sent - self.begin), 0.0)
        try:
            reply = await self._target.client.ask(body)
        except ChatError as error:
            end = _rounded(now() - sent)
            return replace(sample, end=end, error=error.kind, message=str(error)), ""
        accepted = reply.told("speculation", "mean_accepted")
        answered = replace(
            sample,
            end=_rounded(reply.end - sent),
            pieces=[_rounded(when - sent) for when in reply.pieces],
            tokens=reply.tokens,
            counted=reply.counts,
            finish_reason=reply.finish_reason,
            prompt_tokens=int(reply.told("prompt_tokens") or 0),
            cached_tokens=int(reply.told("prompt_tokens_details", "cached_tokens") or 0),
            steps=reply.tokens / accepted if accepted else 0.0,
            drafted=int(reply.told("speculation", "drafted") or 0),
        )
        return answered, reply.text


@dataclass(slots=True)
class _LoadMeter(Meter):
    """Counts conversations, or seconds for loads with a duration."""

    before: float = 0  # what was done when the trial began
    since: float | None = None  # when a trial with a duration began

    def begin_trial(self, load: Arrivals) -> None:
        self.before, self.since = self.done, None if load.duration is None else now()

    def end_conversation(self, tokens: int) -> None:
        passed = 1.0 if self.since is None else self.before + now() - self.since - self.done
        self.advance(passed, tokens)

    def end_trial(self, load: Arrivals) -> None:
        self.advance(self.before + _size(load) - self.done)


def _size(load: Arrivals) -> float:
    """Conversations of a load, or its seconds."""
    return load.requests or load.duration or 0.0


def _rounded(seconds: float) -> float:
    """Round to microseconds, so that files stay small."""
    return round(seconds, 6)
