"""Drafters whose head predicts all depths in one pass, and reads the target's features: DFlash, P-EAGLE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soothsay.core.cache import KVPool
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import FeatureDrafter, draft_ready
from soothsay.drafters.heads.serving import Served
from soothsay.drafters.heads.trained_head import Head
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.drafters.trees.templates import TreeLayout


class OnePassDrafter(FeatureDrafter[Head]):
    """Makes the best tree by the probabilities of the depths, which do not depend on each other.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        pool: the head's keys and values.
        depth: number of guesses in one pass.
        nodes: of the largest tree, the root not counted.
        branch: likeliest tokens at each depth that may be in the tree.
    """

    def __init__(
        self, target: Target, served: Served[Head], pool: KVPool, depth: int, nodes: int, branch: int
    ):
        super().__init__(target, served, pool)
        self.shared, self.depth, self.max_nodes = served.shared, depth, 1 + nodes
        self.layout = TreeLayout("best-first", depth, branch, nodes, target.model.kernels)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        marginals = self.marginals(ready)
        return self.layout.trees(ready, torch.cat(marginals), [len(logits) for logits in marginals])

    @abstractmethod
    def marginals(self, requests: Sequence[Request]) -> list[Tensor]:
        """`[D, V]` float32 for each request: logits of the first D tokens after its root."""

    @abstractmethod
    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass. Return the outputs of the rows that guess, for each request of `batch.ends`."""

    def outputs(self, rows: Mapping[Request, int]) -> list[Tensor]:
        """What `run` returns for each request. `rows`: the number of rows after each request's root."""
        chains = {request: DraftTree(int(request.tokens[-1])) for request in rows}
        for request, count in rows.items():
            chains[request].extend([0] * count)  # their tokens are not read
        found: dict[Request, Tensor] = {}
        for batch in self.kv.catch_up(chains):
            found.update(zip(batch.ends, self.run(batch), strict=True))
        return [found[request] for request in rows]

    def depth_for(self, request: Request) -> int:
        """Guesses that a tree of the request has room for."""
        return min(self.depth, request.max_nodes)
