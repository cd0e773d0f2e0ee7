"""Drafts several tokens in one pass (P-EAGLE 2026, arXiv 2602.01469; DFlash 2026, arXiv 2602.06036).

The rows of committed tokens are EAGLE's: a token, and the target's feature of the token before. After the
root come rows of learned vectors, one for each further depth. One pass over all rows predicts all depths.
These predictions do not depend on each other. A small product of each token with the next can correct that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import LevelwiseDrafter, Observation, Target, check_at_least_one
from soothsay.drafters.heads.loading import load_head
from soothsay.drafters.heads.modules.block import BlockHead
from soothsay.drafters.trees.context import DraftPass, own_pool, pack
from soothsay.drafters.trees.features import FeatureKV
from soothsay.drafters.trees.growth import GrowingTree, TreeGrower, parent_rows
from soothsay.drafters.trees.layout import TreeLayout
from soothsay.drafters.trees.shapes import ConfidentShape


@dataclass(frozen=True, slots=True)
class _NodeRows:
    """What the trees' next level needs: the logits of the one pass, and where the nodes are in them."""

    marginals: Tensor  # [D_1 + D_2 + ..., V or V_short] for each request, a row for each depth
    places: Tensor  # [M] int64, for each node, the row of the tokens below it


class BlockDrafter(LevelwiseDrafter):
    """Predicts all depths in one pass, and makes trees of the likeliest tokens.

    The KV of the learned rows is at the slots of the next tokens, which overwrite it. Without a product of
    each token with the next, the tree is the best one by the probabilities of the depths. With it, the tree
    grows level by level: the product corrects the logits of a depth by the token above.

    Args:
        target: the model to draft for.
        model: a directory with the drafter, or a `BlockHead`; "" is `drafters/block` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, where the tree grows level by level; None: an eighth of
            the largest tree, and at least 4.
        dtype: element type of the drafter's linear layers; "auto" is the target's.
    """

    trained = True

    def __init__(
        self,
        target: Target,
        model: str | Path | BlockHead = "",
        nodes: int = 63,
        branch: int = 8,
        width: int | None = None,
        dtype: DType = "auto",
    ):
        width = max(target.config.max_tree // 8, 4) if width is None else width
        check_at_least_one("block", nodes=nodes, branch=branch, width=width)
        self.target, self.served = target, load_head(BlockHead, model, target, dtype)
        self.head, self.shared, self.taps = self.served.head, self.served.shared, self.served.taps
        size, self.max_nodes = self.head.config.size, 1 + nodes
        self.kv = FeatureKV(target, own_pool(target, self.head.config.block, self.head.dtype))
        self.grower = TreeGrower(ConfidentShape(size, width, branch), target.model.kernels, self.max_nodes)
        self.layout = TreeLayout("best-first", size, branch, nodes, target.model.kernels)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.head.config.markov_rank:
            return self.grower.grow(self, requests, self.min_level_gain)
        trees = {request: DraftTree(int(request.tokens[-1])) for request in requests}
        ready = [request for request in requests if request.max_nodes > 1 and self.ready(request)]
        if ready:
            marginals = self._predict(ready)
            depths = [len(logits) for logits in marginals]
            trees.update(
                zip(ready, self.layout.trees(ready, self._whole(torch.cat(marginals)), depths), strict=True)
            )
        return [*trees.values()]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.kv.observe(observations, self.served.fuse):
            self._run(batch)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        for batch in self.kv.close(request):
            self._run(batch)

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.kv.reset()

    def ready(self, request: Request) -> bool:
        """Return whether all features up to the root are known, see `Expander`."""
        return self.kv.ready(request)

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, _NodeRows]:
        """Compute the one pass, see `Expander`."""
        marginals = self._predict([g.request for g in growing])
        begins = [*accumulate((len(logits) for logits in marginals[:-1]), initial=0)]
        states = _NodeRows(torch.cat(marginals), torch.tensor(begins, device=marginals[0].device))
        return self._correct(growing, states), states

    def expand_nodes(self, growing: Sequence[GrowingTree], states: _NodeRows) -> tuple[Tensor, _NodeRows]:
        """Take the next depth's logits, one row after those of the parents. See `Expander`."""
        above = states.places.index_select(0, parent_rows(growing, states.places.device))
        below = _NodeRows(states.marginals, above + 1)
        return self._correct(growing, below), below

    def _correct(self, growing: Sequence[GrowingTree], states: _NodeRows) -> Tensor:
        """Return `[M, V]` logits below the frontiers' tokens."""
        tokens = [token for g in growing for token in g.frontier_tokens]
        logits = states.marginals.index_select(0, states.places)
        return self._whole(self.head.correct(logits, torch.tensor(tokens, device=logits.device)))

    def _predict(self, requests: Sequence[Request]) -> list[Tensor]:
        """Compute the pass. Return for each request logits of the first D tokens after its root."""
        chains = {}
        for request in requests:
            depth = min(self.head.config.size, request.max_nodes)
            chains[request] = DraftTree(int(request.tokens[-1]))
            chains[request].extend([0] * (depth - 1))  # learned rows; their tokens are not read
        found: dict[Request, Tensor] = {}
        for batch in self.kv.catch_up(chains):
            logits = self.head.logits(self._run(batch), self.shared)
            found.update(
                zip(batch.ends, torch.split(logits, [len(chains[r]) for r in batch.ends]), strict=True)
            )
        return [found[request] for request in requests]

    def _whole(self, logits: Tensor) -> Tensor:
        return self.head.whole(logits, self.shared.vocab_size)

    def _run(self, batch: DraftPass) -> Tensor:
        """Compute a pass; `[M, H]` hidden states of its logit rows."""
        packed, begin = pack(batch.rows, self.target, self.head.config.block), 0
        embedded = self.shared.embed(packed.tokens)
        features = torch.empty_like(embedded)
        for rows, read in zip(batch.rows, batch.features, strict=True):
            learned, end = begin + len(rows.tokens), begin + rows.num_rows
            features[begin:learned] = read
            embedded[learned:end] = self.head.queries[: end - learned, 0]
            features[learned:end] = self.head.queries[: end - learned, 1]
            begin = end
        hidden: Tensor = self.head(embedded, features, packed, self.kv.pool.layers)
        return hidden.index_select(0, packed.logit_rows)
