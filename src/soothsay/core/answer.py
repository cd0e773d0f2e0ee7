"""An answer: its tokens, statistics and text. It needs no torch, since the server's process imports it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, zip_longest
from time import perf_counter
from typing import NamedTuple

from soothsay.core.params import SamplingParams
from soothsay.tokenizer import Detokenizer, Tokenizer


class FinishReason(StrEnum):
    """Why an answer ended.

    Example:
        >>> llm.generate("Once upon", SamplingParams(max_tokens=3, ignore_eos=True)).finish_reason.value
        'length'
    """

    STOP = "stop"  # an end token, or a stop token or string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # the request failed; the result says why


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model itself, before any sampling parameter.

    Example:
        >>> result = llm.generate("Once upon", SamplingParams(temperature=0, max_tokens=1, logprobs=3))
        >>> [one] = result.logprobs
        >>> len(one.top), one.logprob == max(one.top.values())
        (3, True)
    """

    token: int
    logprob: float
    top: dict[int, float]  # the likeliest tokens, likeliest first


class Piece(NamedTuple):
    """One token of an answer as it is streamed.

    Example:
        >>> pieces = list(llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=5)))
        >>> "".join(piece.text for piece in pieces)
        '-reaction-re'
    """

    token: int
    text: str  # text that is now final; may be empty, or come from several tokens
    drafter: str | None = None  # the drafter that proposed the token; None: the target alone
    logprobs: TokenLogprobs | None = None

    @property
    def drafted(self) -> bool:
        """Whether a drafter proposed the token."""
        return self.drafter is not None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one answer: the draft tree, the drafter of each node, and the accepted path.

    Lists are indexed by node; node 0 is the root, the last token before the step. The step emits the
    tokens of `path` and then `bonus`; an answer may end before the last of them.

    Example:
        >>> params = SamplingParams(temperature=0, max_tokens=8)
        >>> result = llm.generate("one two one two one", params, drafter="none", traced=True)
        >>> [step.bonus for step in result.traces] == result.token_ids  # without drafts, each is a bonus
        True
    """

    tokens: list[int]
    parents: list[int]  # -1 for the root; else a smaller number
    scores: list[float]  # the drafter's log P(the path to the node is accepted); 0 for the root
    authors: list[str | None]  # names of drafters; None for the root
    path: list[int]  # accepted nodes below the root, in order
    bonus: int  # the token that the target added itself
    # seconds of the step, which all its requests share: "draft" in drafters, "pass" of the target with its
    # layout, "verify" from logits to verdicts, "host" for the rest; on a GPU, "verify" waits for the pass
    times: Mapping[str, float] = field(default_factory=dict, compare=False)


class StepClock:
    """Adds up the seconds of a step by part; see `StepTrace.times`."""

    __slots__ = ("_begin", "times")

    def __init__(self) -> None:
        self.times = {"draft": 0.0, "pass": 0.0, "verify": 0.0, "host": 0.0}
        self._begin = perf_counter()

    def end(self, part: str) -> None:
        """Count the time since the last call to a part."""
        now = perf_counter()
        self.times[part] += now - self._begin
        self._begin = now


@dataclass(slots=True)
class SpeculationStats:
    """Statistics of speculation for one answer. Lists are indexed by depth, from the first draft token on.

    Example:
        >>> stats = SpeculationStats()
        >>> stats.record(drafted=3, depth=2, authors=["suffix"], emitted=2)
        >>> stats.mean_accepted, stats.acceptance, stats.accepted_by
        (2.0, [1.0, 0.0], {'suffix': [1]})
    """

    steps: int = 0  # forward passes of the target that emitted tokens
    emitted: int = 0  # tokens, including the bonus token of each step
    first: int = 0  # tokens of the first step, which reads the prompt
    drafted: int = 0  # nodes verified, roots not counted
    accepted: int = 0  # draft tokens accepted
    drafted_at: list[int] = field(default_factory=list)  # steps whose tree reached this depth
    accepted_at: list[int] = field(default_factory=list)  # steps that accepted a token at this depth
    accepted_by: dict[str, list[int]] = field(default_factory=dict)  # the same, by drafter

    @property
    def mean_accepted(self) -> float:
        """Acceptance length: tokens a step, including the bonus token. Plain decoding has 1.0."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def after_first_step(self) -> tuple[int, int]:
        """Tokens and steps without the first step, for which most drafters know nothing."""
        return self.emitted - self.first, max(self.steps - 1, 0)

    @property
    def acceptance(self) -> list[float]:
        """By depth: accepted steps as a share of the steps that drafted this deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def drafts(self) -> int:
        """Steps that verified draft tokens."""
        return self.drafted_at[0] if self.drafted_at else 0

    @property
    def accepted_counts(self) -> list[int]:
        """By number, from 0 on: the steps that verified draft tokens and accepted this many of them."""
        at_least = [self.drafts, *self.accepted_at]  # entry j: steps that accepted j tokens or more
        return [more - fewer for more, fewer in pairwise([*at_least, 0])]

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """The statistics of two parts of an answer together. `other` is the later part."""
        first = self.first if self.steps else other.first
        return self._combined(other, 1, first)

    def minus(self, other: SpeculationStats) -> SpeculationStats:
        """The statistics of what came after `other`, an earlier state of these."""
        first = 0 if other.steps else self.first
        return self._combined(other, -1, first)

    def _combined(self, other: SpeculationStats, sign: int, first: int) -> SpeculationStats:
        def lists(own: Sequence[int], others: Sequence[int]) -> list[int]:
            return [a + sign * b for a, b in zip_longest(own, others, fillvalue=0)]

        return SpeculationStats(
            steps=self.steps + sign * other.steps,
            emitted=self.emitted + sign * other.emitted,
            first=first,
            drafted=self.drafted + sign * other.drafted,
            accepted=self.accepted + sign * other.accepted,
            drafted_at=lists(self.drafted_at, other.drafted_at),
            accepted_at=lists(self.accepted_at, other.accepted_at),
            accepted_by={
                name: lists(self.accepted_by.get(name, ()), other.accepted_by.get(name, ()))
                for name in dict.fromkeys([*self.accepted_by, *other.accepted_by])
            },
        )

    def record(self, drafted: int, depth: int, authors: Sequence[str], emitted: int) -> None:
        """Count one step with a tree of `drafted` nodes and this depth.

        Args:
            drafted: nodes, the root not counted.
            depth: of the deepest node.
            authors: the drafter of each draft token that was accepted and emitted, in order.
            emitted: tokens, drafted or not.
        """
        if self.steps == 0:
            self.first = emitted
        self.steps += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += len(authors)
        for counts in (self.drafted_at, self.accepted_at):
            counts.extend([0] * (depth - len(counts)))
        for level in range(depth):
            self.drafted_at[level] += 1
        for level, author in enumerate(authors):
            self.accepted_at[level] += 1
            own = self.accepted_by.setdefault(author, [])
            own.extend([0] * (level + 1 - len(own)))
            own[level] += 1


class AnswerText:
    """Turns the tokens of an answer into text, up to the first stop string. Without a tokenizer, no text."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams):
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt, skip_special=params.skip_special_tokens)
        self._stops, self._keeps_stop = sorted(params.stop), params.include_stop_str_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # may begin a stop string, so it is not final yet
        self._parts: list[str] = []  # of the text
        self.stop = ""  # the stop string that ended it; empty: none did

    def push(self, tokens: Sequence[int], *, final: bool, is_silent: bool, kept: int) -> list[str]:
        """Add tokens. Returns the text that is final after each; fewer if a stop string ends the answer.

        The last token may be final, and silent: without text. The first `kept` ones complete no stop string.
        """
        if self._detokenizer is None:
            return [""] * len(tokens)
        own = tokens[:-1] if is_silent else tokens
        texts = self._detokenizer.push_each(own, final=final and not is_silent)
        if is_silent:
            texts.append(self._detokenizer.push((), final=final))
        for place, text in enumerate(texts, start=1) if self._stops else ():
            texts[place - 1] = self._released(text, final and place == len(texts), place > kept)
            if self.stop:
                del texts[place:]
                break
        self._parts += texts
        return texts

    @property
    def text(self) -> str:
        """All text that is final."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def _released(self, text: str, final: bool, may_stop: bool) -> str:
        """The text that is final once more text has come."""
        self._held += text
        found = [(at, stop) for stop in self._stops if may_stop and (at := self._held.find(stop)) >= 0]
        if found:
            start, self.stop = min(found, key=lambda one: (one[0], len(one[1])))
            certain = start + len(self.stop) if self._keeps_stop else start
        elif final:
            certain = len(self._held)
        else:
            certain = self._first_begun()
        out, self._held = self._held[:certain], self._held[certain:]
        return out

    def _first_begun(self) -> int:
        """The first place in the held text from which on it may become a stop string; its end: none."""
        held, stops = self._held, self._stops
        for place in range(max(len(held) - self._longest + 1, 0), len(held)):
            after = bisect(stops, held[place:])  # of the stop strings that go on after this text, the first
            if after < len(stops) and stops[after].startswith(held[place:]):
                return place
        return len(held)
