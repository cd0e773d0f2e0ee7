"""Drafters whose head predicts all depths in one pass, and reads the target's features: DFlash, P-EAGLE."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from soothsay.core.request import Request
from soothsay.core.transfer import send
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import FeatureDrafter, Served, draft_ready
from soothsay.drafters.heads.trained_head import OnePassHead
from soothsay.drafters.trees.growth import ConfidentShape, Expander, GrowingTree, TreeGrower, parent_rows
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.drafters.trees.templates import TreeLayout
from soothsay.model.specs.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PathRows:
    """What a tree's next level needs of one pass. N are all depths of all requests, M nodes."""

    logits: Tensor  # [N, V_short] of the one pass alone, the depths of a request one after the other
    read: Tensor  # [N, n]: what `correct` reads of the outputs
    places: Tensor  # [M] int64, for each node, the row of the tokens below it
    states: Tensor  # [M, ...] of the nodes


AnyOnePassHead = TypeVar("AnyOnePassHead", bound=OnePassHead, covariant=True)


class OnePassDrafter(FeatureDrafter[AnyOnePassHead], Expander[PathRows]):
    """Makes the best tree by the probabilities of the depths, which do not depend on each other.

    A subclass may correct the guesses below a node by the tokens above them. Then its trees grow level by
    level, with the same one pass.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        block: describes the decoder blocks.
        depth: number of guesses in one pass.
        nodes: of the largest tree, the root not counted.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, if guesses are corrected; None: they are not.
        scratch: slots for keys and values that are not kept.
    """

    def __init__(
        self,
        target: Target,
        served: Served[AnyOnePassHead],
        block: ModelSpec,
        depth: int,
        nodes: int,
        branch: int,
        width: int | None = None,
        scratch: int = 0,
    ):
        super().__init__(target, served, block, scratch)
        self.depth, self.max_nodes = depth, 1 + nodes
        ops = target.model.kernels.sampling
        self.layout = TreeLayout("best-first", depth, branch, nodes, ops)
        self.grower: TreeGrower | None = None
        if width is not None:
            self.grower = TreeGrower(ConfidentShape(depth, width, branch), ops, self.max_nodes)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.grower is not None:
            return self.grower.grow(self, requests, self.min_level_gain)
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        depths = [self.depth_for(request) for request in ready]
        logits = self.head.whole(self.predict(ready).logits, self.shared.vocab_size)
        return self.layout.trees(ready, logits, depths)

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> PathRows:
        """Compute the one pass. The nodes are the parents of the requests' roots."""

    def correct(self, rows: PathRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Correct the logits below nodes of one depth; here they stay.

        Args:
            rows: for each node, those of the tokens below it, and the state of its parent.
            tokens: `[M]` of the nodes.

        Returns:
            `[M, V_short]` float32 logits, minus infinity for tokens that are ruled out; the nodes' states.
        """
        return rows.logits, rows.states

    @abstractmethod
    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass. Return the outputs of the rows that guess, for each request of `batch.ends`."""

    def outputs(self, rows: Mapping[Request, int]) -> list[Tensor]:
        """What `run` returns for each request. `rows`: the number of rows after each request's root."""
        chains = {request: DraftTree(request.last_token) for request in rows}
        for request, count in rows.items():
            chains[request].extend([0] * count)  # their tokens are not read
        found: dict[Request, Tensor] = {}
        for batch in self.kv.catch_up(chains):
            found.update(zip(batch.ends, self.run(batch), strict=True))
        return [found[request] for request in rows]

    def depth_for(self, request: Request) -> int:
        """Guesses that a tree of the request has room for."""
        return min(self.depth, request.max_nodes)

    def places(self, requests: Sequence[Request]) -> Tensor:
        """`[R]` int64, the row of each request's first guess."""
        depths = (self.depth_for(request) for request in requests[:-1])
        return send([*accumulate(depths, initial=0)], self.target.model.device)

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, PathRows]:
        """Compute the one pass, see `Expander`."""
        return self._expand(growing, self.predict([g.request for g in growing]))

    def expand_nodes(self, growing: Sequence[GrowingTree], states: PathRows) -> tuple[Tensor, PathRows]:
        """Take the next depth's logits, one row after those of the parents. See `Expander`."""
        above = parent_rows(growing, states.places.device)
        places, own = states.places.index_select(0, above) + 1, states.states.index_select(0, above)
        return self._expand(growing, PathRows(states.logits, states.read, places, own))

    def _expand(self, growing: Sequence[GrowingTree], rows: PathRows) -> tuple[Tensor, PathRows]:
        """`[M, V]` logits below the frontiers' tokens, and the frontiers' states."""
        tokens = send([t for g in growing for t in g.frontier_tokens], rows.places.device)
        own, read = (part.index_select(0, rows.places) for part in (rows.logits, rows.read))
        logits, states = self.correct(PathRows(own, read, rows.places, rows.states), tokens)
        whole = self.head.whole(logits, self.shared.vocab_size)
        return whole, PathRows(rows.logits, rows.read, rows.places, states)


class MaskRowsDrafter(OnePassDrafter[AnyOnePassHead]):
    """A one-pass drafter whose root is followed by learned rows, one for each further depth.

    The KV of these rows is at the slots of the next tokens, which overwrite it. Arguments are those of
    `OnePassDrafter`.
    """

    @abstractmethod
    def learned_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """What the rows after a root read, in place of embeddings and features: `[count or 1, H]` each."""

    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass: `[D, H]` outputs of each root and the learned rows after it."""
        packed, begin = self.pack(batch.rows), 0
        embedded = self.head.embed(packed.tokens, self.shared)
        features = torch.empty_like(embedded)
        for rows, read in zip(batch.rows, batch.features, strict=True):
            learned, end = begin + len(rows.tokens), begin + rows.num_rows
            features[begin:learned] = read
            embedded[learned:end], features[learned:end] = self.learned_rows(end - learned)
            begin = end
        out: Tensor = self.head(embedded, features, packed, self.kv.pool.layers)
        counts = [len(rows.tree) for rows in batch.rows if rows.tree is not None]
        return [*torch.split(packed.select_logit_rows(out), counts)]

    def guessing(self, requests: Sequence[Request]) -> list[Tensor]:
        """The outputs of all depths that trees have room for, for each request."""
        return self.outputs({request: self.depth_for(request) - 1 for request in requests})

    def predict(self, requests: Sequence[Request]) -> PathRows:
        """See `OnePassDrafter`. Nothing but logits is read below nodes."""
        logits = self.head.logits(torch.cat(self.guessing(requests)), self.shared)
        nothing = logits.new_empty(len(logits), 0)
        return PathRows(logits, nothing, self.places(requests), nothing[: len(requests)])
