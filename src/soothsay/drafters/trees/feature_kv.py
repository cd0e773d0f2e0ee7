"""What drafters that read the target's features keep of each request.

A feature is what a drafter keeps of the target's hidden states at one token. `FeatureKV` serves drafters that
have KV of their own and read the feature of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Observation
from soothsay.drafters.trees.own_kv import DraftPass, KVState, NotedBlock, OwnKV

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
        kept = [seen.committed_rows for seen in observations]
        device = observations[0].taps[0].device
        places = [torch.tensor(rows, device=device) for rows in kept]
        taps = [
            torch.cat([tap.index_select(0, rows) for tap, rows in zip(layer, places, strict=True)])
            for layer in zip(*(seen.taps for seen in observations), strict=True)
        ]
        parts = torch.split(fuse(taps), [len(rows) for rows in kept])
        for seen, features in zip(observations, parts, strict=True):
            state = self.states.get(seen.request)
            if state is None:
                state = self.states[seen.request] = self._begin(seen.request, seen.start, features[:0])
            state.features = torch.cat([state.features, features])
        yield from self._fill([seen.request for seen in observations if seen.num_pending >= READ])

    def ready(self, request: Request) -> bool:
        """Return whether the features of all rows up to the root's are known."""
        state = self.states.get(request)
        return state is not None and state.cached + len(state.features) == len(request.tokens)

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

    def _holds(self, request: Request, number: int, block: int) -> bool:
        """See `OwnKV`. The first token of a text has no row; where another one has none, the text is cut."""
        return super()._holds(request, number, block) and (number == 0 or not self.notes[block].lacks_first)

    def _begin(self, request: Request, start: int, none: Tensor) -> FeatureState:
        """Return the state of a request whose tokens below `start` will not be shown. `none` is `[0, H]`."""
        first = full = start // self.block_size
        while first > 0 and super()._holds(request, first - 1, request.blocks[first - 1]):
            first -= 1
            if self.notes[request.blocks[first]].lacks_first:
                break
        if first == full:
            return FeatureState(
                blocks=request.blocks, cached=start + 1, noted=full, first_key=start + 1, features=none
            )
        feature = self.notes[request.blocks[full - 1]].feature
        assert feature is not None
        return FeatureState(
            blocks=request.blocks,
            cached=start,
            noted=full,
            first_key=first * self.block_size + self.notes[request.blocks[first]].lacks_first,
            features=feature[None],
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
