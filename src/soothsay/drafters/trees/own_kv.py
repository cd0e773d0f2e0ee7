"""A drafter's own keys and values: which committed tokens have them, and which rows must be computed.

They live in a pool of the drafter's own, which has the target's blocks and slots. The target may find a block
in its prefix cache that the drafter never computed. So the drafter notes by content what its blocks hold.

`OwnKV` is what all such drafters share. `TokenKV` serves a drafter that reads tokens only; it can always
compute what is missing. `FeatureKV` serves a drafter that reads the target's features too. A feature is what
it keeps of the target's hidden states at one token.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool, Move
from soothsay.core.request import Observation, Request
from soothsay.core.transfer import upload
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
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
                left = request.length - state.cached
                at_end = tree is not None and left + len(tree) - 1 <= room
                count = left if at_end else request.whole(state.cached, min(left - 1, room))
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
        own = tokens, state.cached, table, tree
        batch.rows.append(Rows(*own, first_key=state.first_key, source=request.num_source))
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
        return request.length - 1 - self._open(request).cached

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
            state, end = self.states.get(seen.request), seen.request.length
            if (
                state is not None and seen.verdict is not None and state.cached == end
            ):  # it drafted in this step
                path = state.expanded.walk(seen.verdict.tokens[:-1])[1:]
                moves.append(Move(seen.request.table, [end - 1 + node for node in path], end))
                state.cached += len(path)
        self.pool.commit(moves)

    def _open(self, request: Request) -> TokenState:
        """Return the request's state. A new one starts after the blocks that the pool already holds."""
        state = self.states.get(request)
        if state is None:
            known = self.num_held(request, request.blocks[: request.num_full_blocks])
            cached = request.reusable(min(known * self.block_size, request.length - 1))
            root = DraftTree(request.last_token)
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
    kernels = target.model.kernels
    return Batch.pack(
        rows,
        block_size=target.config.block_size,
        group=config.group,
        windows=config.windows,
        device=target.model.device,
        ops=kernels if kernels.fit(config) else None,  # stock operations read no plan of other kernels
    )


def committed(observations: Sequence[Observation], layers: slice = slice(None)) -> list[list[Tensor]]:
    """`Observation.committed_rows` of the taps of some layers: views where these rows follow each other."""
    kept = [_committed_rows(seen) for seen in observations]
    scattered = [torch.tensor(rows) for rows in kept if not isinstance(rows, slice)]
    places = iter(upload(scattered, observations[0].taps[0].device) if scattered else ())
    parts = list[list[Tensor]]()
    for seen, rows in zip(observations, kept, strict=True):
        if isinstance(rows, slice):
            parts.append([tap[rows] if rows.stop < len(tap) else tap for tap in seen.taps[layers]])
        else:
            place = next(places)
            parts.append([tap.index_select(0, place) for tap in seen.taps[layers]])
    return parts


def _committed_rows(seen: Observation) -> slice | Sequence[int]:
    path = () if seen.verdict is None else seen.verdict.path
    if not path or path[-1] == len(path):  # the accepted nodes are 1, 2, ...
        return slice(seen.num_pending + len(path))
    return seen.committed_rows


READ = 64
"""Number of tokens. A piece of a prompt that has at least as many is computed as soon as its features are
there; a shorter one is computed with the next draft."""

Fuse = Callable[[Sequence[Tensor]], Tensor]
"""Makes features `[N, H]` float32 of the target's taps, `[N, H_target]` each."""


@dataclass(slots=True, kw_only=True)
class FeatureState(KVState):
    """A request of a drafter that reads features."""

    features: Tensor  # [k, H] of tokens cached - 1, cached, ...: what the next k rows read


class FeatureKV(OwnKV[FeatureState]):
    """The KV of a drafter whose row t reads token t and the target's feature of token t - 1.

    The first token that the drafter is shown has no feature before it. So it gets no row, unless the block
    before it is noted. Rows of accepted draft tokens are computed again, with the target's features.

    Example:
        A prompt of 5 tokens is new. The target's step shows features of tokens 0 to 4 and emits token 5. The
        rows are tokens 1 to 5, which read features 0 to 4, and `first_key` is 1.
    """

    def observe(self, observations: Sequence[Observation], fuse: Fuse) -> Iterator[DraftPass]:
        """Keep the features of the tokens that a step commits.

        Yields passes; each must be computed before the next is asked for. They fill two kinds of gaps: rows
        of full blocks of requests that nobody drafts for, so that other requests can use these blocks; and
        long pieces of prompts, so that their time is not counted as drafting time.
        """
        yield from self._fill([seen.request for seen in observations])
        own = committed(observations)
        taps = own[0] if len(own) == 1 else [torch.cat(layer) for layer in zip(*own, strict=True)]
        fused = fuse(taps)
        parts = (fused,) if len(own) == 1 else torch.split(fused, [len(one[0]) for one in own])
        for seen, features in zip(observations, parts, strict=True):
            state = self.states.get(seen.request)
            if state is None:
                state = self.states[seen.request] = self._begin(seen.request, seen.start, features[:0])
            state.features = torch.cat([state.features, features]) if len(state.features) else features
        yield from self._fill([seen.request for seen in observations if seen.num_pending >= READ])

    def ready(self, request: Request) -> bool:
        """Return whether the features of all rows up to the root's are known."""
        state = self.states.get(request)
        return state is not None and state.cached + len(state.features) == request.length

    def close(self, request: Request) -> Iterator[DraftPass]:
        """Plan passes over what full blocks of a request still lack, then forget the request.

        The blocks may be free by now, but nobody has written to them yet.
        """
        yield from self._fill([request])
        self.release(request)

    def _fill(self, requests: Sequence[Request]) -> Iterator[DraftPass]:
        """Plan passes over the missing rows of full blocks whose features are known.

        Requests that are drafted for at every step have none: `catch_up` leaves nothing to do.
        """
        waiting, size = dict.fromkeys(r for r in requests if r in self.states), self.block_size
        while waiting:
            batch, room = DraftPass(), self.max_rows
            for request in list(waiting):
                state = self.states[request]
                known = min(state.cached + len(state.features), request.length)
                end = min((known - 1) // size, len(state.blocks)) * size
                count = min(end - state.cached, room)
                if count > 0:
                    self._add(batch, request, state, count, None)
                    room -= count
                if state.cached >= end:
                    self._note(request, state, end)
                    del waiting[request]
            if batch.rows:
                yield batch

    def _holds(self, request: Request, number: int, block: int) -> bool:
        """See `OwnKV`. The first token of a text has no row; where another one has none, the text is cut."""
        return super()._holds(request, number, block) and (number == 0 or not self.notes[block].lacks_first)

    def _begin(self, request: Request, start: int, features: Tensor) -> FeatureState:
        """Return the state of a request whose tokens below `start` are not shown. `features` is `[0, H]`."""
        first = full = start // self.block_size
        while first > 0 and super()._holds(request, first - 1, request.blocks[first - 1]):
            first -= 1
            if self.notes[request.blocks[first]].lacks_first:
                break
        cached = first_key = start + 1
        if first < full:
            feature = self.notes[request.blocks[full - 1]].feature
            assert feature is not None
            cached, features = start, feature[None]
            first_key = first * self.block_size + self.notes[request.blocks[first]].lacks_first
        return FeatureState(
            blocks=request.blocks, cached=cached, noted=full, first_key=first_key, features=features
        )

    def _add(
        self, batch: DraftPass, request: Request, state: FeatureState, count: int, tree: DraftTree | None
    ) -> None:
        """Put a request's next `count` tokens into a pass, with what they read."""
        read, left = state.features[:count], state.features[count:]
        super()._add(batch, request, state, count, tree)
        batch.features.append(read)
        state.features = left

    def _note(self, request: Request, state: FeatureState, end: int) -> None:
        """Note full blocks, except the last one while the feature of its last token is not known."""
        super()._note(request, state, min(end, state.cached + len(state.features) - 1))

    def _describe(self, request: Request, state: FeatureState, after: int) -> NotedBlock:
        """Return the note on the block that ends before offset `after`, with its last token's feature."""
        feature = state.features[after - state.cached].clone()
        lacks_first = state.noted * self.block_size < state.first_key
        return NotedBlock(request.digest(state.noted), feature, lacks_first)
