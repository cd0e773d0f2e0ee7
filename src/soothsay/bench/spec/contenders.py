"""Contenders of `soothsay bench spec`: a drafter on our engine, and a server with OpenAI's protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from soothsay import LLM, Drafter, DraftTree, Observation, Request, SamplingParams
from soothsay.bench.chat_client import TIMEOUT, ChatClient, TimedReply
from soothsay.bench.spec.theory import TreeCounts, added
from soothsay.core.verify import Promise
from soothsay.drafters.base import DrafterProxy
from soothsay.tokenizer import Message


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """One turn of a question, as a request."""

    messages: tuple[Message, ...]
    prompt: list[int]  # token ids of the messages
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A contender's answer to one turn."""

    token_ids: list[int]  # an end token included
    text: str


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times and counts of one contender that answered some turns in one batch. Times are in seconds."""

    answers: int
    different: int | None  # answers that are not plain decoding's: must be 0. None: not comparable
    tokens: int  # raw token ids, up to the end token
    seconds: float  # until the last answer ended
    prefill: float  # until each answer had its first token
    ahead: int  # tokens emitted by then
    cpu: float = 0.0  # CPU time of the engine's thread
    draft: float = 0.0  # in the drafter, after prefill
    verify: float = 0.0  # from drafts to verdicts, after prefill
    steps: int = 0  # forward passes that emitted tokens, summed over answers
    first: int = 0  # tokens that the first steps emitted, summed over answers
    drafted: int = 0  # tree nodes verified, without roots
    # element i: steps that accepted a node at depth i + 1
    accepted_at: list[int] = field(default_factory=list)
    # after prefill, for predictions; empty and 0 if unknown
    passes: int = 0
    context: float = 0.0  # tokens before the tree, mean over steps
    tree_sizes: list[float] = field(default_factory=list)  # see `TreeCounts`
    accepted_ranks: list[float] = field(default_factory=list)  # see `TreeCounts`
    # if trees are kept: each tree after prefill, as `SeenTree.record` says, in order
    trees: list[dict[str, Any]] = field(default_factory=list)


class Contender(Protocol):
    """Answers a batch of turns."""

    name: str

    def reset(self) -> None:
        """Forget everything learnt from earlier questions."""

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Answer the turns in one batch.

        Returns the times, with `different` still None, and the answers; None if they cannot be compared with
        ours.
        """


@dataclass(frozen=True, slots=True)
class SeenTree:
    """A tree that was verified."""

    request: Request
    num_output: int  # of the request, before the step
    tree: DraftTree
    path: list[int]  # accepted nodes
    draft: float  # seconds of `propose`, for all requests of the step
    verify: float  # seconds from there to the verdict, for all requests of the step

    @property
    def accepted(self) -> list[int]:
        """Accepted nodes without those after the answer's end. Right once the request has ended."""
        return self.path[: self.request.num_output - self.num_output - 1]

    def record(self, answer: int) -> dict[str, Any]:
        """The tree as JSON values. `answer` is the number of its answer in the batch."""
        return {
            "answer": answer,
            "said": self.num_output,
            "tokens": self.tree.tokens,
            "parents": self.tree.parents,
            "scores": [round(score, 4) for score in self.tree.scores],
            "accepted": self.accepted,
            "draft": self.draft,
            "verify": self.verify,
        }


class TimedDrafter(DrafterProxy):
    """Measures the time that a drafter takes, and the time between its draft and the verdict.

    Attributes:
        draft: seconds in the drafter since `restart`.
        verify: seconds from the end of `propose` to the start of `observe`, since `restart`.
        passes: steps since `restart` that verified trees.
        seen: these trees.
    """

    def __init__(self, drafter: Drafter):
        super().__init__(drafter)
        self.restart()

    def restart(self) -> None:
        """Set the times to zero, and forget the trees."""
        self.draft = self.verify = 0.0
        self.passes = 0
        self.seen: list[SeenTree] = []
        self._proposed: float | None = None
        self._drafting = 0.0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Draft, and take the time."""
        begin = time.perf_counter()
        trees = self.drafter.propose(requests)
        self._proposed = time.perf_counter()
        self._drafting = self._proposed - begin
        self.draft += self._drafting
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Let the drafter learn, and take the time."""
        begin = time.perf_counter()
        # None: the step was a prompt chunk, without a draft
        verifying = 0.0 if self._proposed is None else begin - self._proposed
        self.verify += verifying
        self._proposed = None
        self.drafter.observe(observations)
        self.draft += time.perf_counter() - begin
        times = self._drafting, verifying
        seen = [
            SeenTree(one.request, one.request.num_output, one.tree, one.verdict.path, *times)
            for one in observations
            if one.tree is not None and one.verdict is not None
        ]
        self.passes += bool(seen)
        self.seen += seen

    def release(self, request: Request) -> None:
        """Let the drafter forget a request, and take the time."""
        begin = time.perf_counter()
        self.drafter.release(request)
        self.draft += time.perf_counter() - begin


class DrafterContender:
    """A drafter on our engine. See `Contender`.

    Args:
        name: the drafter's name in reports.
        llm: the target's engine, without other requests.
        drafter: a drafter built for that target.
        verifier: by name; see `SamplingParams`.
        trees: whether runs have their `trees`.
    """

    def __init__(self, name: str, llm: LLM, drafter: Drafter, verifier: str = "match", trees: bool = False):
        self.name, self._llm, self._timed = name, llm, TimedDrafter(drafter)
        self._verifier, self._keep_trees = verifier, trees

    def reset(self) -> None:
        """Forget everything learnt from earlier questions."""
        self._timed.reset()

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Answer the turns in one batch; see `Contender`.

        Answers are comparable if the verifier keeps the tokens.
        """
        params = [replace(one.params, verifier=self._verifier) for one in asked]
        engine, begin, cpu = self._llm.engine, time.perf_counter(), time.thread_time()
        pairs = zip(asked, params, strict=True)
        streams = [self._llm.stream(one.prompt, own, drafter=self._timed) for one, own in pairs]
        requests = [*engine.scheduler.waiting]
        try:
            while engine.has_work and not all(request.num_output for request in requests):
                engine.step()
            prefilled, ahead = time.perf_counter(), sum(request.num_output for request in requests)
            self._timed.restart()
            while engine.has_work:
                engine.step()
        except BaseException:  # also on Ctrl-C, no request may stay in the engine
            for stream in streams:
                stream.cancel()
            raise
        end, cpu = time.perf_counter(), time.thread_time() - cpu
        run = self._run(requests, seconds=end - begin, prefill=prefilled - begin, ahead=ahead, cpu=cpu)
        choices = [stream.choice for stream in streams]
        if any(own.rule.promise is not Promise.TOKENS for own in params):
            return run, None
        return run, [TurnAnswer(choice.token_ids, choice.text) for choice in choices]

    def _run(self, requests: Sequence[Request], **measured: Any) -> RunTimes:
        """What was measured, with counts of steps and trees."""
        timed, stats, trees = self._timed, [request.stats for request in requests], TreeCounts()
        for seen in timed.seen:
            trees.record(seen.tree, seen.accepted)
        before = sum(seen.request.num_prompt + seen.num_output - 1 for seen in timed.seen)
        names = {"tokens": "emitted", "steps": "steps", "first": "first", "drafted": "drafted"}
        return RunTimes(
            answers=len(requests),
            different=None,
            **{name: sum(getattr(one, theirs) for one in stats) for name, theirs in names.items()},
            draft=timed.draft,
            verify=timed.verify,
            accepted_at=added([one.accepted_at for one in stats]),
            passes=timed.passes,
            context=before / len(timed.seen) if timed.seen else 0.0,
            tree_sizes=trees.sizes,
            accepted_ranks=trees.ranks,
            trees=[seen.record(requests.index(seen.request)) for seen in timed.seen if self._keep_trees],
            **measured,
        )


class Endpoint:
    """A model on a server. See `soothsay.bench.spec.contenders.Contender`.

    Tokens are counted by the server's `usage`, or else its pieces of text are counted. The server applies its
    own chat template and tokenizer, so answers are not compared with ours. Rates compare only as far as its
    tokens are like ours. The benchmark cannot control the server's prefix cache.

    Args:
        url: the server's address, up to where `/chat/completions` follows: "http://localhost:8000/v1".
        model: the server's name for the model.
        key: sent as the bearer token; empty: none.
        timeout: seconds without a byte after which a request fails.

    Raises `SoothsayError` if `url` is not an address; so does `answer` if the server cannot be reached or
    refuses a request.
    """

    def __init__(self, url: str, model: str, key: str = "", timeout: float = TIMEOUT):
        self._client = ChatClient(url, model, key, timeout)
        self.name = self._client.name

    def reset(self) -> None:
        """Do nothing: a client cannot make a server forget."""

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Send all questions at once. Connections are made before the clock starts."""
        return asyncio.run(self._answer(asked)), None

    async def _answer(self, asked: Sequence[AskedTurn]) -> RunTimes:
        connected = asyncio.Barrier(len(asked))
        replies = await asyncio.gather(*(self._client.ask(_body(one), connected.wait) for one in asked))
        begin = min(reply.begin for reply in replies)
        prefilled = max(reply.pieces[0] if reply.pieces else reply.end for reply in replies)
        return RunTimes(
            answers=len(asked),
            different=None,
            tokens=sum(reply.tokens for reply in replies),
            seconds=max(reply.end for reply in replies) - begin,
            prefill=prefilled - begin,
            ahead=sum(_tokens_by(reply, prefilled) for reply in replies),
        )


def _body(asked: AskedTurn) -> dict[str, Any]:
    own = {name: getattr(asked.params, name) for name in ("temperature", "max_tokens", "seed")}
    return {"messages": list(asked.messages), **own}


def _tokens_by(reply: TimedReply, moment: float) -> int:
    """Estimate the tokens that had come by `moment`, with equally many tokens in every piece."""
    there = sum(when <= moment for when in reply.pieces)
    return round(reply.tokens * there / len(reply.pieces)) if reply.pieces else reply.tokens
