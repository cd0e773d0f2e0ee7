"""Drafters whose head predicts all depths in one pass, and reads the target's features: DFlash, P-EAGLE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soothsay.core.cache import KVPool
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import LevelwiseDrafter, Observation, Target
from soothsay.drafters.heads.serving import Served, ServedHead
from soothsay.drafters.trees.context import DraftPass
from soothsay.drafters.trees.features import FeatureKV
from soothsay.drafters.trees.layout import TreeLayout


class OnePassDrafter(LevelwiseDrafter):
    """Makes the best tree by the probabilities of the depths, which do not depend on each other.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        pool: the head's keys and values.
        depth: number of guesses in one pass.
        nodes: of the largest tree, the root not counted.
        branch: likeliest tokens at each depth that may be in the tree.
    """

    trained = True

    def __init__(
        self, target: Target, served: Served[ServedHead], pool: KVPool, depth: int, nodes: int, branch: int
    ):
        self.target, self.served, self.shared, self.taps = target, served, served.shared, served.taps
        self.depth, self.max_nodes = depth, 1 + nodes
        self.kv = FeatureKV(target, pool)
        self.layout = TreeLayout("best-first", depth, branch, nodes, target.model.kernels)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        trees = {request: DraftTree(int(request.tokens[-1])) for request in requests}
        ready = [request for request in requests if request.max_nodes > 1 and self.ready(request)]
        if ready:
            marginals = self.marginals(ready)
            depths = [len(logits) for logits in marginals]
            trees.update(zip(ready, self.layout.trees(ready, torch.cat(marginals), depths), strict=True))
        return [*trees.values()]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.kv.observe(observations, self.served.fuse):
            self.run(batch)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        for batch in self.kv.close(request):
            self.run(batch)

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.kv.reset()

    def ready(self, request: Request) -> bool:
        """Return whether all features up to the root are known."""
        return self.kv.ready(request)

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
