"""A request on its way through the engine, and what it needs of the drafter that it chose."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from soothsay.core.answer import AnswerText, FinishReason, Piece, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.core.arrays import IntArray
from soothsay.core.bad_sequences import BadSequences
from soothsay.core.constraint import Constraint
from soothsay.core.params import SamplingParams
from soothsay.core.scores import PromptScores
from soothsay.core.tenant import EVERYBODY, Tenant, block_digest, first_digest
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict
from soothsay.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class Request:
    """One answer in the making. The engine changes it; drafters only read it.

    The KV of the first `cached` tokens is in `blocks`; `tokens[cached:]` are pending. `max_nodes` is the
    largest tree that the scheduler allows in the coming step. `max_depth` is the deepest useful tree.

    Args:
        prompt: token ids.
        params: how to sample.
        seed: of this answer.
        limit: tokens of prompt and answer together, at most.
        drafter: proposes the draft trees.
        eos_ids: tokens that end an answer.
        tokenizer: for the answer's text; None: there is no text.
        block_size: tokens in a block of the KV pool.
        constraint: the compiled grammar of the parameters; not shared with other requests.
        max_guesses: draft tokens in a step, at most; None: as many as drafter and engine allow.
        priority: requests with a lower number are served first; within a number, callers take turns.
        traced: whether to keep `traces`.
        tenant: whose request it is. It shares nothing with requests of other tenants.
        bad_sequences: the tokens of `params.bad_words`; none of these sequences comes in the answer.
        scores: takes the log-probabilities of the prompt. The other answers to it have the same object.
        adapter: the name of the model's adapter that answers it; None: the model alone does.
        num_source: the first tokens of the prompt, which an encoder reads in both directions.

    Example:
        >>> [request] = llm.requests([5, 6, 7], SamplingParams(max_tokens=4))
        >>> request.tokens.tolist(), request.last_token, request.num_output
        ([5, 6, 7], 7, 0)
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        limit: int,
        drafter: RequestDrafter,
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        block_size: int = 16,
        constraint: Constraint | None = None,
        max_guesses: int | None = None,
        priority: int = 0,
        traced: bool = False,
        tenant: Tenant = EVERYBODY,
        bad_sequences: BadSequences | None = None,
        scores: PromptScores | None = None,
        adapter: str | None = None,
        num_source: int = 0,
    ):
        self.params = params
        self.tenant = tenant
        self.adapter = adapter
        self.seed = seed
        self.drafter = drafter
        self.num_prompt, self.num_source = len(prompt), num_source
        self.limit = limit
        self.block_size = block_size
        self.constraint = constraint
        self.bad_sequences = bad_sequences
        self.max_guesses = max_guesses
        self.priority = priority
        self.caller: Hashable = None  # who shares the engine with others; see `Scheduler`
        self.arrival = self.turn = 0  # its numbers in order of arrival and of service, set by the scheduler
        self.end_tokens = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self.draws_plainly = constraint is None and params.draws_plainly
        """Whether a draw needs the model's logits, the temperature and noise alone."""
        self._tokens = np.empty(limit, dtype=np.int64)
        self._tokens[: self.num_prompt] = prompt
        self._numbers = self._tokens.data  # the same, faster for single ones
        self._readable = self._tokens.view()  # what drafters see cannot be written
        self._readable.flags.writeable = False
        self.length = self.num_prompt  # number of committed tokens
        self._digests: list[bytes] = []
        self.cached = 0
        self._blocks: list[int] = []
        self._table: IntArray | None = None  # None: `blocks` has changed since it was made
        self.state: int | None = None  # the slot of its state, if the model has states
        self.marks: list[tuple[int, int]] = []  # snapshots of the coming step; see `Snapshots`
        self.branch = 0  # a border of blocks after which other requests go on otherwise; 0: none is known
        self.last_snapshot: bytes | None = None  # the digest of that in the answer
        self.max_nodes = 1
        self.num_preemptions = 0
        self.awaited: tuple[Request, int] | None = None  # computes this many tokens first; see `Scheduler`
        self.num_prefix_hits = 0  # tokens whose KV the prefix cache had when the request was first admitted
        self.prompt_logprobs = PromptScores() if scores is None else scores  # filled if they are requested
        self.answer = AnswerText(tokenizer, prompt[num_source:], params)  # a source is a text of its own
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None  # why the finish reason is "error"
        self.pieces: deque[Piece] = deque()  # emitted, and not yet read by the caller
        self.finish_unreported = False  # the answer ended without a token, and the caller has not read that
        self.traces: deque[StepTrace] | None = deque() if traced else None  # one a step, not yet read

    @property
    def tokens(self) -> IntArray:
        """Committed tokens: the prompt, then the answer so far. A read-only view: copy what is to be kept."""
        return self._readable[: self.length]

    @property
    def last_token(self) -> int:
        """The last committed token."""
        return self._numbers[self.length - 1]

    def pending(self, count: int) -> IntArray:
        """The next `count` committed tokens without KV. A read-only view."""
        return self._readable[self.cached : self.cached + count]

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV."""
        return self.length - self.cached

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return self.length - self.num_prompt

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose requested log-probabilities are missing."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    @property
    def num_sharable(self) -> int:
        """Tokens at the beginning whose KV may come from the prefix cache, since nothing else is needed.

        The last token's logits are needed in any case, and those before each token without log-probabilities.
        """
        return len(self.prompt_logprobs) if self.num_unscored else self.length - 1

    def whole(self, start: int, count: int) -> int:
        """How many tokens from `start` on are read at once: `count`, or more, since no source is cut."""
        return max(count, self.num_source - start)

    def reusable(self, count: int) -> int:
        """How many of `count` cached tokens at the beginning are of use: none of a part of a source."""
        return count if count >= self.num_source else 0

    @property
    def max_depth(self) -> int:
        """Draft tokens in a row that can be of use: one more token, the bonus, must fit after them."""
        return max(self.limit - self.length - 1, 0)

    @property
    def blocks(self) -> list[int]:
        """The blocks of the KV pool that the request has. Assign to it to change them."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: list[int]) -> None:
        self._blocks, self._table = blocks, None

    @property
    def table(self) -> IntArray:
        """The request's blocks, `[blocks]` int64."""
        if self._table is None:
            self._table = np.array(self._blocks, dtype=np.int64)
        return self._table

    @property
    def num_full_blocks(self) -> int:
        """Blocks that committed tokens fill."""
        return self.length // self.block_size

    def digest(self, block: int) -> bytes:
        """Identify the tenant, the adapter and the tokens from the first one to the end of a full block.

        Each token of a source sees all of it, so that all blocks depend on the whole source.
        """
        while len(self._digests) <= block:
            i, size = len(self._digests), self.block_size
            parent = self._digests[-1] if self._digests else self._first_digest
            self._digests.append(block_digest(parent, self._tokens[i * size : (i + 1) * size]))
        return self._digests[block]

    @property
    def _first_digest(self) -> bytes:
        own = first_digest(self.tenant, self.adapter)
        return block_digest(own, self._tokens[: self.num_source]) if self.num_source else own

    def num_common_blocks(self, other: Request, most: int) -> int:
        """How many full blocks of two requests' tokens are equal, from the first one on; `most` at most."""
        most = min(most, other.num_full_blocks)
        return bisect_left(range(most), True, key=lambda block: self.digest(block) != other.digest(block))

    def emit(
        self,
        tokens: Sequence[int],
        authors: Sequence[str] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> int:
        """Append tokens until one of them ends the answer; return how many were appended.

        The end of an answer does not depend on how many tokens a step brought.

        Args:
            tokens: in order.
            authors: the drafters that proposed the first tokens, by name. Nobody proposed the others.
            logprobs: one for each token, if the request wants them.
        """
        length, reason, is_silent = self.length, None, False
        if not (room := self.limit - length):  # only the prompt was to be read
            self.finish_reason, self.finish_unreported = FinishReason.LENGTH, True
            return 0
        if len(tokens) >= room:
            tokens, reason = tokens[:room], FinishReason.LENGTH
        if not self.end_tokens.isdisjoint(tokens):
            end = next(place for place, token in enumerate(tokens, start=1) if token in self.end_tokens)
            tokens, reason = tokens[:end], FinishReason.STOP
            is_silent = not self.params.include_stop_str_in_output
        kept = self.num_prompt + self.params.min_tokens - length
        texts = self.answer.push(tokens, final=reason is not None, is_silent=is_silent, kept=kept)
        self.finish_reason = FinishReason.STOP if self.answer.stop else reason
        parts = tokens, texts, chain(authors, repeat(None)), logprobs or repeat(None)
        for token, text, author, own in zip(*parts, strict=False):
            self._numbers[length] = token
            length += 1
            self.pieces.append(Piece(token, text, author, own))
        self.length = length
        return len(texts)

    def resume(self, tokens: Sequence[int], *, ended: bool) -> None:
        """Take over an answer that another engine has begun, or in which it is further than this one.

        The answer goes on as it does after a preemption: with all its tokens, and without the KV of new ones.

        Args:
            tokens: all that the other engine has emitted.
            ended: whether the answer has ended.
        """
        if new := tokens[self.num_output :]:
            self.emit(new)
        elif ended:  # only the prompt was to be read
            self.finish_reason = FinishReason.LENGTH
        self.pieces.clear()


@dataclass(slots=True)
class Observation:
    """What one request's turn in a step showed its drafter, before the new tokens are appended.

    Its rows are the pending tokens `tokens[start : start + num_pending]`, then the tree's nodes from 1 on. A
    prefill chunk that ends before the committed tokens do has no tree, no logits and no verdict.

    Example:
        >>> class Followers(Drafter):
        ...     max_nodes = 2
        ...     after = {}  # the token that came after each one the last time
        ...
        ...     def propose(self, requests):
        ...         trees = [DraftTree(request.last_token) for request in requests]
        ...         for tree in trees:
        ...             tree.extend(self.after.get(tree.tokens[0], []))
        ...         return trees
        ...
        ...     def observe(self, observations):
        ...         for one in observations:
        ...             if one.verdict is not None:
        ...                 self.after[one.request.last_token] = one.verdict.tokens[:1]
        >>> params = SamplingParams(temperature=0, max_tokens=8)
        >>> _ = llm.generate("Once upon a time", params, drafter=Followers)
        >>> llm.generate("Once upon a time", params, drafter=Followers).stats.mean_accepted
        2.0
    """

    request: Request
    start: int
    num_pending: int
    taps: tuple[Tensor, ...]  # for each of the drafter's taps: [rows, hidden] float32
    tree: DraftTree | None = None
    all_logits: Tensor | None = None  # [M, V] float32, of the whole pass
    verdict: Verdict | None = None
    nodes: slice | None = None  # the tree's rows of `all_logits`; None: all

    @property
    def logits(self) -> Tensor | None:
        """`[nodes, V]` float32 of the target at every node, rejected ones included."""
        logits, nodes = self.all_logits, self.nodes
        return logits if logits is None or nodes is None else logits[nodes]

    @property
    def committed_rows(self) -> list[int]:
        """The rows whose tokens are committed, those of accepted draft tokens included."""
        path = () if self.verdict is None else self.verdict.path
        return [*range(self.num_pending), *(self.num_pending + node - 1 for node in path)]


class RequestDrafter(Protocol):
    """A drafter as a request, the scheduler and the engine see it.

    `soothsay.drafters.base.Drafter` is the class that drafters inherit, and documents the members.
    """

    taps: tuple[int, ...]
    max_nodes: int
    trained: bool

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def decisions(self) -> Mapping[str, int]: ...  # noqa: D102

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]: ...  # noqa: D102

    def observe(self, observations: Sequence[Observation]) -> None: ...  # noqa: D102

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]: ...  # noqa: D102

    def num_known(self, request: Request, blocks: Sequence[int]) -> int: ...  # noqa: D102

    def release(self, request: Request) -> None: ...  # noqa: D102

    def learned(self) -> Sequence[Any]: ...  # noqa: D102

    def study(self) -> bool: ...  # noqa: D102

    def reset(self) -> None: ...  # noqa: D102
