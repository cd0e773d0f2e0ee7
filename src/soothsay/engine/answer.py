"""What is said of an answer, and its text as it comes. Without torch, for a server's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from soothsay.engine.params import SamplingParams
from soothsay.tokenizer import Detokenizer, Tokenizer


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end token, or a stop token or string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # it could not be served; the result says why


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model itself, before any sampling parameter."""

    token: int
    logprob: float
    top: dict[int, float]  # the likeliest tokens, likeliest first


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer as it is streamed."""

    token: int
    text: str  # what is now certain of the text; may be empty, or of several tokens
    drafter: str | None = None  # the name of the drafter that had guessed it; None: the target's own
    logprobs: TokenLogprobs | None = None

    @property
    def drafted(self) -> bool:
        """Whether a drafter had guessed it."""
        return self.drafter is not None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one answer: what was guessed, by whom, and what held.

    Lists are indexed by node; node 0 is the root, the last token before the step. The step's tokens are those
    of `path` and then `bonus`, though an answer may end before the last of them.
    """

    tokens: list[int]
    parents: list[int]  # -1 for the root; else a smaller number
    authors: list[str | None]  # by name; None for the root
    path: list[int]  # accepted nodes below the root, in order
    bonus: int  # the token that the target added itself


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one answer. Lists are indexed by depth: first guess, second guess, ..."""

    steps: int = 0  # forward passes of the target that emitted tokens
    emitted: int = 0  # tokens, the bonus token of each step included
    first: int = 0  # of them, those of the first step, which reads the prompt
    drafted: int = 0  # nodes verified, roots not counted
    accepted: int = 0  # of them, right
    drafted_at: list[int] = field(default_factory=list)  # steps whose tree reached this depth
    accepted_at: list[int] = field(default_factory=list)  # steps that accepted this deep
    accepted_by: dict[str, list[int]] = field(default_factory=dict)  # of them, by who had guessed it

    @property
    def mean_accepted(self) -> float:
        """Tokens a step, counting the bonus: 1.0 for plain decoding."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def behind_prompt(self) -> tuple[int, int]:
        """Tokens and steps without those of the pass over the prompt, in which most drafters know nothing."""
        return self.emitted - self.first, max(self.steps - 1, 0)

    @property
    def acceptance(self) -> list[float]:
        """By depth: of the steps that guessed this deep, the share that was right so deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def record(self, drafted: int, depth: int, authors: Sequence[str], emitted: int) -> None:
        """Count one step with a tree of `drafted` nodes and this depth.

        Args:
            drafted: nodes, the root not counted.
            depth: of the deepest.
            authors: who had guessed each of the tokens that were guessed and emitted, in order.
            emitted: tokens, guessed or not.
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


class Answer:
    """Text of an answer as its tokens come, cut at the first stop string. No tokenizer, no text."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams):
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._stops = tuple(params.stop)
        self._held = ""  # might become a stop string, so it is not given out yet
        self.text = ""
        self.stopped = False

    def push(self, token: int | None, *, final: bool, may_stop: bool) -> str:
        """Add a token (None: one without text) and return the text that is now certain."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push([] if token is None else [token], final=final)
        starts = [at for stop in self._stops if may_stop and (at := self._held.find(stop)) >= 0]
        if starts:
            self.stopped = True
            certain = min(starts)
        elif final:
            certain = len(self._held)
        else:
            certain = len(self._held) - max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._held = self._held[:certain], self._held[certain:]
        self.text += out
        return out

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the held text that `stop` begins with."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
