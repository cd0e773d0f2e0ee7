"""A request on its way through the engine: its tokens, its memory, its answer so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from soothsay.engine.cache import block_digest
from soothsay.engine.grammar import Constraint
from soothsay.engine.sampling import SamplingParams
from soothsay.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from soothsay.drafters.base import Drafter

IntArray = npt.NDArray[np.int64]


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


class Request:
    """One answer in the making. The engine owns all of it; drafters read it.

    `cached` tokens have their KV in `blocks`; `tokens[cached:]` are pending. `max_nodes` is how large a tree
    the scheduler allows in the coming step, and `max_depth` how deep it can be of use.

    Args:
        prompt: token ids.
        params: how to sample.
        seed: of this answer.
        limit: tokens of prompt and answer together.
        drafter: who guesses.
        eos_ids: tokens that end an answer.
        tokenizer: for the answer's text; None: there is none.
        block_size: tokens in a block of the KV pool.
        constraint: of the parameters' grammar; its own, not shared with other requests.
        max_guesses: nodes below the root that may be verified in a step; None: as many as anyone.
        priority: requests with a lower one go first; among equals, whoever came first.
        traced: whether `traces` are kept.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        limit: int,
        drafter: Drafter,
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        block_size: int = 16,
        constraint: Constraint | None = None,
        max_guesses: int | None = None,
        priority: int = 0,
        traced: bool = False,
    ):
        self.params = params
        self.seed = seed
        self.drafter = drafter
        self.num_prompt = len(prompt)
        self.limit = limit
        self.block_size = block_size
        self.constraint = constraint
        self.max_guesses = max_guesses
        self.priority = priority
        self.arrival = 0  # its number among all that were added, set then
        self.end_tokens = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self._tokens = np.empty(limit, dtype=np.int64)
        self._tokens[: self.num_prompt] = prompt
        self._length = self.num_prompt
        self._digests: list[bytes] = []
        self.cached = 0
        self.blocks: list[int] = []
        self.max_nodes = 1
        self.num_preemptions = 0
        self.num_prefix_hits = 0  # tokens whose KV was found when the request was first admitted
        self.answer = Answer(tokenizer, prompt, params)
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self.pieces: deque[Piece] = deque()  # emitted, not yet read by the caller
        self.traces: deque[StepTrace] | None = deque() if traced else None  # likewise

    @property
    def tokens(self) -> IntArray:
        """Committed tokens, the prompt's first. A view: copy what is to be kept."""
        return self._tokens[: self._length]

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV."""
        return self._length - self.cached

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return self._length - self.num_prompt

    @property
    def max_depth(self) -> int:
        """Guesses in a row that can be of use: behind them one more token, the bonus, must still fit."""
        return self.limit - self._length - 1

    @property
    def table(self) -> IntArray:
        """The request's blocks as an array."""
        return np.array(self.blocks, dtype=np.int64)

    @property
    def num_full_blocks(self) -> int:
        """Blocks that committed tokens fill."""
        return self._length // self.block_size

    def digest(self, block: int) -> bytes:
        """Identity of the tokens up to the end of a full block."""
        while len(self._digests) <= block:
            i, size = len(self._digests), self.block_size
            parent = self._digests[-1] if self._digests else b""
            self._digests.append(block_digest(parent, self._tokens[i * size : (i + 1) * size]))
        return self._digests[block]

    def emit(
        self,
        tokens: Sequence[int],
        authors: Sequence[str] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> int:
        """Append tokens until one ends the answer; return how many. The first ones were guessed by `authors`,
        the others by nobody.

        One token at a time, so that where an answer ends cannot depend on how many came in a step.
        """
        for i, token in enumerate(tokens):
            self._tokens[self._length] = token
            self._length += 1
            if token in self.end_tokens:
                self.finish_reason = FinishReason.STOP
            elif self._length == self.limit:
                self.finish_reason = FinishReason.LENGTH
            text = self.answer.push(
                None if token in self.end_tokens else token,
                final=self.finish_reason is not None,
                may_stop=self.num_output > self.params.min_tokens,
            )
            if self.answer.stopped:
                self.finish_reason = FinishReason.STOP
            author = authors[i] if i < len(authors) else None
            self.pieces.append(Piece(token, text, author, logprobs[i] if logprobs else None))
            if self.finish_reason is not None:
                return i + 1
        return len(tokens)


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
