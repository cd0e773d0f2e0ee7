"""A request on its way through the engine: its tokens, its memory, its answer so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from soothsay.engine.answer import (
    Answer,
    FinishReason,
    Piece,
    SpeculationStats,
    StepTrace,
    TokenLogprobs,
)
from soothsay.engine.cache import block_digest
from soothsay.engine.grammar import Constraint
from soothsay.engine.params import SamplingParams
from soothsay.tokenizer import Tokenizer

if TYPE_CHECKING:
    from soothsay.drafters.base import Drafter

IntArray = npt.NDArray[np.int64]


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
