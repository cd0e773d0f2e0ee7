"""Drafts several tokens in one pass (P-EAGLE 2026, arXiv 2602.01469; DFlash 2026, arXiv 2602.06036).

The rows of committed tokens are EAGLE's: a token, and the target's feature of the token before. After the
root come rows of learned vectors, one for each further depth. One pass over all rows predicts all depths.
These predictions do not depend on each other. A small product of each token with the next can correct that,
or a recurrent cell along each path (ReDrafter, Cheng et al. 2024, arXiv 2403.09919).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.block.block_head import BlockHead
from soothsay.drafters.heads.feature_drafter import draft_ready
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter
from soothsay.drafters.heads.refiner import RefinedTrees
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.ops.refinement import HeadOutputs
from soothsay.drafters.trees.growth import GrowingTree, TreeGrower, parent_rows
from soothsay.drafters.trees.own_kv import DraftPass, own_pool, pack
from soothsay.drafters.trees.tree_shapes import ConfidentShape


@dataclass(frozen=True, slots=True)
class _NodeRows:
    """What the trees' next level needs: the logits of the one pass, and where the nodes are in them."""

    marginals: Tensor  # [D_1 + D_2 + ..., V or V_short] for each request, a row for each depth
    places: Tensor  # [M] int64, for each node, the row of the tokens below it


class BlockDrafter(OnePassDrafter):
    """Predicts all depths in one pass, and makes trees of the likeliest tokens.

    The KV of the learned rows is at the slots of the next tokens, which overwrite it. Without a product of
    each token with the next, the tree is the best one by the probabilities of the depths. With it, the tree
    grows level by level: the product corrects the logits of a depth by the token above. With a cell, it grows
    node by node: the cell refines the likeliest tokens of a depth below each node.

    Args:
        target: the model to draft for.
        model: a directory with the drafter, or a `BlockHead`; "" is `drafters/block` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, where the tree grows level by level; None: an eighth of
            the largest tree, and at least 4.
        dtype: element type of the drafter's linear layers; "auto" is the target's.
    """

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
        served = load_head(BlockHead, model, target, dtype)
        self.head = head = served.head
        pool, size = own_pool(target, head.config.block, head.dtype), head.config.size
        super().__init__(target, served, pool, size, nodes, branch)
        cell = head.refiner
        self.refined = (
            None if cell is None else RefinedTrees(head, cell, self.shared, target.ops, self.max_nodes)
        )
        self.grower = TreeGrower(ConfidentShape(size, width, branch), target.model.kernels, self.max_nodes)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.refined is not None:
            return draft_ready(requests, self.ready, partial(self._refine, self.refined))
        if self.head.config.markov_rank:
            return self.grower.grow(self, requests, self.min_level_gain)
        return super().propose(requests)

    def _refine(self, refined: RefinedTrees, ready: Sequence[Request]) -> list[DraftTree]:
        """Trees whose guesses the cell refines. Those of one call have the same number of depths."""
        outputs = self._outputs(ready)
        trees: dict[Request, DraftTree] = {}
        for depth in {len(rows) for rows in outputs}:
            some = {r: rows for r, rows in zip(ready, outputs, strict=True) if len(rows) == depth}
            roots = torch.tensor([int(r.tokens[-1]) for r in some], device=outputs[0].device)
            embedded = self.head.embedded(roots, self.shared)
            rows, read, states = refined.cell.begin(torch.stack([*some.values()]), embedded)
            head_outputs = HeadOutputs(self.head.logits(rows, self.shared), read, states)
            trees.update(zip(some, refined.trees([*some], head_outputs), strict=True))
        return [trees[request] for request in ready]

    def marginals(self, requests: Sequence[Request]) -> list[Tensor]:
        """See `OnePassDrafter`."""
        return [self._whole(logits) for logits in self._predict(requests)]

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
        outputs = self._outputs(requests)
        logits = self.head.logits(torch.cat(outputs), self.shared)
        return [*torch.split(logits, [len(rows) for rows in outputs])]

    def _outputs(self, requests: Sequence[Request]) -> list[Tensor]:
        """Compute the pass. Return for each request what it says of the first D tokens after the root."""
        return self.outputs({request: self.depth_for(request) - 1 for request in requests})

    def _whole(self, logits: Tensor) -> Tensor:
        return self.head.whole(logits, self.shared.vocab_size)

    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass: `[D, H]` hidden states of each root and the learned rows after it."""
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
        counts = [len(rows.tree) for rows in batch.rows if rows.tree is not None]
        return [*torch.split(packed.select_logit_rows(hidden), counts)]
