"""Keys and values of a drafter's own: which committed tokens have them, and which rows are to be run next.

They live in a pool of the drafter's, addressed by the target's blocks and slots. A block that the target
found in its prefix cache may never have been seen by the drafter; so what the drafter has computed is noted
by content. `Context` serves a drafter that reads tokens; it can always fill in what it has not seen.
`FeatureContext` serves one that reads the target's features too; what it has not seen stays invisible to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from soothsay.drafters.base import Observation, Target
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import KVPool, Move
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree

READ = 64
"""Tokens of a prompt that are read as soon as their features are there; fewer wait for the next guesses."""


@dataclass(slots=True)
class State:
    """A request as the drafter sees it."""

    blocks: list[int]  # the request's own list, which grows with it, and is kept when the request loses it
    cached: int  # committed tokens whose KV is in the drafter's pool, or need not be
    noted: int  # full blocks of them that are noted by content
    expanded: DraftTree  # the last tree's nodes that were run, in order of their slots
    first_key: int = 0  # KV at offsets below is not there
    features: Tensor | None = None  # [k, H] of tokens cached - 1, cached, ...: what the next k rows read


@dataclass(frozen=True, slots=True)
class Noted:
    """What a full block of the drafter's pool holds."""

    digest: bytes
    feature: Tensor | None = None  # [H] of its last token, which the row behind it reads
    lacks_first: bool = False  # whether its first slot is not there


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows to run, no more than `EngineConfig.max_rows`."""

    requests: list[Request] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    """For each of `requests`, what it puts into the pass."""
    features: list[Tensor] = field(default_factory=list)
    """For each of `rows`, the `[p, H]` that its p tokens read, each of the token before; none if the drafter
    reads tokens only."""

    @property
    def ends(self) -> list[Request]:
        """Those whose rows have a tree: the logit rows of the pass are theirs."""
        return [r for r, rows in zip(self.requests, self.rows, strict=True) if rows.tree is not None]


class Context:
    """What a drafter that reads tokens knows of its requests."""

    def __init__(self, target: Target, pool: KVPool):
        self.pool = pool
        self.states: dict[Request, State] = {}
        self._block_size, self._max_rows = target.config.block_size, target.config.max_rows
        self._noted: dict[int, Noted] = {}  # block -> what is in it

    def open(self, request: Request) -> State:
        """The request's state; a new one starts behind the blocks whose content is there already."""
        state = self.states.get(request)
        if state is None:
            known = 0
            while known < request.num_full_blocks and self._holds(request, known):
                known += 1
            cached = min(known * self._block_size, len(request.tokens) - 1)
            root = DraftTree(int(request.tokens[-1]))
            state = State(request.blocks, cached, cached // self._block_size, root)
            self.states[request] = state
        return state

    def catch_up(self, trees: Mapping[Request, DraftTree]) -> Iterator[Pass]:
        """Passes over all committed tokens without KV; the last of a request comes with its tree.

        Each is to be run before the next is asked for. A tree has its request's root and no more nodes than
        `request.max_nodes`.
        """
        waiting = dict(trees)
        while waiting:
            batch, room = Pass(), self._max_rows
            for request, tree in list(waiting.items()):
                state = self.states[request]
                left = len(request.tokens) - state.cached
                at_end = left + len(tree) - 1 <= room
                count = left if at_end else min(left - 1, room)
                if count < 1:
                    continue
                self._add(batch, request, state, count, tree if at_end else None)
                room -= batch.rows[-1].num_rows
                if at_end:
                    del waiting[request]
            if not batch.rows:
                raise ValueError(f"a tree is larger than a pass, which has {room} rows")
            yield batch

    def commit(self, observations: Sequence[Observation]) -> None:
        """Keep the KV of the nodes that were run and accepted: move it next to the context."""
        moves = []
        for seen in observations:
            state, behind = self.states.get(seen.request), len(seen.request.tokens)
            if state is None or seen.verdict is None:
                continue
            if state.cached == behind:  # it drafted in this step
                path = state.expanded.walk(seen.verdict.tokens[:-1])[1:]
                moves.append(Move(seen.request.table, [behind - 1 + node for node in path], behind))
                state.cached += len(path)
        self.pool.commit(moves)

    def release(self, request: Request) -> None:
        """Forget a request; what is noted of its blocks stays."""
        self.states.pop(request, None)

    def reset(self) -> None:
        """Forget what is in the blocks of requests that have ended."""
        self._noted.clear()

    def _holds(self, request: Request, block: int) -> bool:
        """Whether a block of the request has its content in the drafter's pool."""
        noted = self._noted.get(request.blocks[block])
        return noted is not None and noted.digest == request.digest(block)

    def _add(self, batch: Pass, request: Request, state: State, count: int, tree: DraftTree | None) -> None:
        """Put a request's next `count` tokens into a pass."""
        for block in state.blocks[state.noted :]:  # it may write there
            self._noted.pop(block, None)
        tokens = request.tokens[state.cached : state.cached + count]
        table = np.array(state.blocks, dtype=np.int64)
        batch.requests.append(request)
        batch.rows.append(Rows(tokens, state.cached, table, tree, first_key=state.first_key))
        self._note(request, state, state.cached + count)
        if state.features is not None:
            batch.features.append(state.features[:count])
            state.features = state.features[count:]
        state.cached += count

    def _note(self, request: Request, state: State, end: int) -> None:
        """Note the blocks that are full when tokens up to `end` have their KV."""
        while (behind := (state.noted + 1) * self._block_size) <= end:
            feature = None
            if state.features is not None:
                if behind - state.cached >= len(state.features):
                    return  # it comes later; then the block is noted
                feature = state.features[behind - state.cached].clone()
            lacks_first = state.noted * self._block_size < state.first_key
            noted = Noted(request.digest(state.noted), feature, lacks_first)
            self._noted[state.blocks[state.noted]] = noted
            state.noted += 1


class FeatureContext(Context):
    """What a drafter knows of its requests whose row t reads token t and the target's feature of token t - 1.

    The feature before the first token that it is shown is missing, so there is no row for that token, unless
    the block before it is noted. Rows of accepted guesses are run again, with the target's features.
    """

    def observe(
        self, observations: Sequence[Observation], fuse: Callable[[Sequence[Tensor]], Tensor]
    ) -> Iterator[Pass]:
        """Keep the features of the tokens that are committed now.

        Gives passes, each to be run before the next is asked for: over what full blocks still lack of
        requests that nobody drafts for, so that others find them; and over long pieces of prompts, whose time
        is not that of guessing.

        `fuse` makes `[N, H]` float32 of the taps, `[N, H_target]` each.
        """
        yield from self._fill([seen.request for seen in observations])
        kept = [_committed_rows(seen) for seen in observations]
        taps = [
            torch.cat([tap[rows] for tap, rows in zip(layer, kept, strict=True)])
            for layer in zip(*(seen.taps for seen in observations), strict=True)
        ]
        parts = torch.split(fuse(taps), [len(rows) for rows in kept])
        for seen, features in zip(observations, parts, strict=True):
            state = self.states.get(seen.request)
            if state is None:
                state = self.states[seen.request] = self._begin(seen.request, seen.start, features[:0])
            assert state.features is not None
            state.features = torch.cat([state.features, features])
        yield from self._fill([seen.request for seen in observations if seen.num_pending >= READ])

    def ready(self, request: Request) -> bool:
        """Whether all features are known that the rows up to the root's read."""
        state = self.states.get(request)
        if state is None or state.features is None:
            return False
        return state.cached + len(state.features) == len(request.tokens)

    def close(self, request: Request) -> Iterator[Pass]:
        """Passes over what full blocks of a request still lack, which is forgotten then.

        They may be free by now, but nobody has written to them.
        """
        yield from self._fill([request])
        self.release(request)

    def _fill(self, requests: Sequence[Request]) -> Iterator[Pass]:
        """Passes over the missing rows of full blocks whose features are known.

        There are none for requests that are drafted for at every step: `catch_up` leaves nothing to do.
        """
        waiting, size = dict.fromkeys(r for r in requests if r in self.states), self._block_size
        while waiting:
            batch, room = Pass(), self._max_rows
            for request in list(waiting):
                state = self.states[request]
                assert state.features is not None
                known = min(state.cached + len(state.features), len(request.tokens))
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

    def _begin(self, request: Request, start: int, none: Tensor) -> State:
        """The state of a request whose tokens up to `start` will not be shown. `none` is `[0, H]`."""
        first = full = start // self._block_size
        while first > 0 and self._holds(request, first - 1):
            first -= 1
            if self._noted[request.blocks[first]].lacks_first:
                break
        root = DraftTree(int(request.tokens[-1]))
        if first == full:
            return State(request.blocks, start + 1, full, root, start + 1, none)
        feature = self._noted[request.blocks[full - 1]].feature
        assert feature is not None
        first_key = first * self._block_size + self._noted[request.blocks[first]].lacks_first
        return State(request.blocks, start, full, root, first_key, feature[None])


def pack(rows: Sequence[Rows], target: Target, group: int, windows: Sequence[int | None]) -> Batch:
    """Lay out a drafter's pass; `group` and `windows` are its own."""
    return Batch.pack(
        rows,
        block_size=target.config.block_size,
        group=group,
        windows=windows,
        device=target.model.device,
    )


def _committed_rows(seen: Observation) -> list[int]:
    """Rows of an observation whose tokens are committed, the accepted guesses included."""
    path = () if seen.verdict is None else seen.verdict.path
    return [*range(seen.num_pending), *(seen.num_pending + node - 1 for node in path)]
