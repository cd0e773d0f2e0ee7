"""A drafter's own keys and values: which committed tokens have them, and which rows must be computed.

They live in a pool of the drafter's own, which has the target's blocks and slots. The target may find a block
in its prefix cache that the drafter never computed. So the drafter notes by content what its blocks hold.

`OwnKV` is what all such drafters share. `TokenKV` serves a drafter that reads tokens only; it can always
compute what is missing. `features.FeatureKV` serves a drafter that reads the target's features too.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool, Move
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Observation, Target
from soothsay.model.specs.model_spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class KVState:
    """A request as the drafter's pool sees it."""

    blocks: list[int]  # the request's own list: it grows with the request, and stays when it loses its blocks
    cached: int  # committed tokens that have their KV in the drafter's pool, or will never have it
    noted: int  # full blocks of these tokens that are noted by content
    first_key: int = 0  # tokens at offsets below have no KV, and are not visible


@dataclass(frozen=True, slots=True)
class NotedBlock:
    """What a full block of the drafter's pool holds."""

    digest: bytes  # identity of the tokens up to the block's end
    feature: Tensor | None = None  # [H] of its last token, which the row after it reads
    lacks_first: bool = False  # whether its first slot has no KV


@dataclass(frozen=True, slots=True)
class DraftPass:
    """Rows to compute in one pass of the drafter, at most `EngineConfig.max_rows`.

    Example:
        Request A has tokens 5 to 9 without KV and a tree of one node, request B a long prompt. The rows are
        A's tokens 5 to 9, with the tree, and a chunk of B's tokens, without one. `ends` is A alone.
    """

    requests: list[Request] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)  # for each request, its part of the pass
    features: list[Tensor] = field(default_factory=list)
    """For each of `rows`, `[p, H]`: its p tokens read the feature of the token before them. Empty if the
    drafter reads tokens only."""

    @property
    def ends(self) -> list[Request]:
        """The requests whose rows end with a tree. The logit rows of the pass are theirs."""
        return [r for r, rows in zip(self.requests, self.rows, strict=True) if rows.tree is not None]


AnyState = TypeVar("AnyState", bound=KVState)


class OwnKV(ABC, Generic[AnyState]):
    """Knows which tokens of each request have KV in the drafter's pool, and plans passes over the rest.

    Args:
        target: whose blocks and slots the pool has.
        pool: the drafter's keys and values.
    """

    def __init__(self, target: Target, pool: KVPool):
        self.pool = pool
        self.states: dict[Request, AnyState] = {}
        self.block_size, self.max_rows = target.config.block_size, target.config.max_rows
        self.notes: dict[int, NotedBlock] = {}  # block -> its content

    def catch_up(self, trees: Mapping[Request, DraftTree | None]) -> Iterator[DraftPass]:
        """Plan passes over all committed tokens without KV; a request's last rows come with its tree.

        Each pass must be computed before the next is asked for. A tree has its request's root, and at most
        `request.max_nodes` nodes. A request without a tree is computed up to the token before the root.

        Raises:
            ValueError: a tree has more rows than a pass may have.
        """
        waiting = dict(trees)
        while waiting:
            batch, room = DraftPass(), self.max_rows
            for request, tree in list(waiting.items()):
                state = self.states[request]
                left = len(request.tokens) - state.cached
                at_end = tree is not None and left + len(tree) - 1 <= room
                count = left if at_end else min(left - 1, room)
                if count >= 1:
                    self._add(batch, request, state, count, tree if at_end else None)
                    room -= batch.rows[-1].num_rows
                if at_end or (tree is None and count == left - 1):
                    del waiting[request]
            if batch.rows:
                yield batch
            elif waiting:
                raise ValueError(f"a tree is larger than a pass, which has {room} rows")

    def release(self, request: Request) -> None:
        """Forget a request. The notes on its blocks stay."""
        self.states.pop(request, None)

    def reset(self) -> None:
        """Forget what the blocks of finished requests hold."""
        self.notes.clear()

    def num_held(self, request: Request, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks of a request have their KV in the drafter's pool."""
        held = 0
        while held < len(blocks) and self._holds(request, held, blocks[held]):
            held += 1
        return held

    def _holds(self, request: Request, number: int, block: int) -> bool:
        """Return whether `block` has the KV of the request's block `number`, and of all text before it."""
        noted = self.notes.get(block)
        return noted is not None and noted.digest == request.digest(number)

    def _add(
        self, batch: DraftPass, request: Request, state: AnyState, count: int, tree: DraftTree | None
    ) -> None:
        """Put a request's next `count` tokens into a pass."""
        for block in state.blocks[state.noted :]:  # the pass may write there
            self.notes.pop(block, None)
        tokens = request.tokens[state.cached : state.cached + count]
        table = np.array(state.blocks, dtype=np.int64)
        batch.requests.append(request)
        batch.rows.append(Rows(tokens, state.cached, table, tree, first_key=state.first_key))
        self._note(request, state, state.cached + count)
        state.cached += count

    def _note(self, request: Request, state: AnyState, end: int) -> None:
        """Note the blocks that are full once all tokens below offset `end` have their KV."""
        while (after := (state.noted + 1) * self.block_size) <= end:
            self.notes[state.blocks[state.noted]] = self._describe(request, state, after)
            state.noted += 1

    def _describe(self, request: Request, state: AnyState, after: int) -> NotedBlock:
        """Return the note on the block that ends before offset `after`."""
        return NotedBlock(request.digest(state.noted))


@dataclass(slots=True, kw_only=True)
class TokenState(KVState):
    """A request of a drafter that reads tokens."""

    expanded: DraftTree  # the last tree's nodes that have KV, in the order of their slots after the context


class TokenKV(OwnKV[TokenState]):
    """The KV of a drafter that reads tokens only."""

    def unread(self, request: Request) -> int:
        """The number of a request's tokens without KV, without the last; it may be new."""
        return len(request.tokens) - 1 - self._open(request).cached

    def catch_up(self, trees: Mapping[Request, DraftTree | None]) -> Iterator[DraftPass]:
        """Plan passes, see `OwnKV`; requests may be new.

        The trees may grow afterwards. `commit` takes them as they are then.
        """
        for request, tree in trees.items():
            state = self._open(request)
            state.expanded = state.expanded if tree is None else tree
        yield from super().catch_up(trees)

    def commit(self, observations: Sequence[Observation]) -> None:
        """Keep the KV of nodes that were computed and accepted: move it to the end of the context.

        Example:
            The context has 10 tokens, and the tree root(a, b(c)) was expanded: its KV is at slots 9 to 12. If
            b and c are accepted, slots 11 and 12 are moved to 10 and 11.
        """
        moves = []
        for seen in observations:
            state, end = self.states.get(seen.request), len(seen.request.tokens)
            if state is None or seen.verdict is None:
                continue
            if state.cached == end:  # it drafted in this step
                path = state.expanded.walk(seen.verdict.tokens[:-1])[1:]
                moves.append(Move(seen.request.table, [end - 1 + node for node in path], end))
                state.cached += len(path)
        self.pool.commit(moves)

    def _open(self, request: Request) -> TokenState:
        """Return the request's state. A new one starts after the blocks that the pool already holds."""
        state = self.states.get(request)
        if state is None:
            known = self.num_held(request, request.blocks[: request.num_full_blocks])
            cached = min(known * self.block_size, len(request.tokens) - 1)
            root = DraftTree(int(request.tokens[-1]))
            noted = cached // self.block_size
            state = TokenState(blocks=request.blocks, cached=cached, noted=noted, expanded=root)
            self.states[request] = state
        return state


def own_pool(target: Target, config: ModelSpec, dtype: torch.dtype, scratch: int = 0) -> KVPool:
    """Return a pool for decoder blocks as `config` describes them.

    It has the target's blocks and slots, and after them at least `scratch` slots.
    """
    size = target.config.block_size
    return KVPool(config.kv_shapes, target.num_blocks + -(-scratch // size), size, dtype, target.model.device)


def pack(rows: Sequence[Rows], target: Target, config: ModelSpec) -> Batch:
    """Lay out a pass of a drafter whose decoder blocks are as `config` describes them."""
    return Batch.pack(
        rows,
        block_size=target.config.block_size,
        group=config.group,
        windows=config.windows,
        device=target.model.device,
        ops=target.model.kernels,
    )
