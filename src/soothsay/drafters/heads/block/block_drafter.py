"""Drafts several tokens in one pass (P-EAGLE 2026, arXiv 2602.01469; DFlash 2026, arXiv 2602.06036).

The rows of committed tokens are EAGLE's: a token, and the target's feature of the token before. After the
root come rows of learned vectors, one for each further depth. One pass over all rows predicts all depths.
These predictions do not depend on each other. A small product of each token with the next can correct that,
or a recurrent cell along each path (ReDrafter, Cheng et al. 2024, arXiv 2403.09919).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.block.block_head import BlockHead
from soothsay.drafters.heads.feature_drafter import draft_ready
from soothsay.drafters.heads.one_pass_drafter import MaskRowsDrafter, PathRows
from soothsay.drafters.heads.refiner import RefinedTrees
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.ops.draft_ops import HeadOutputs


class BlockDrafter(MaskRowsDrafter[BlockHead]):
    """Predicts all depths in one pass, and makes trees of the likeliest tokens.

    Without a product of each token with the next, the tree is the best one by the probabilities of the
    depths. With it, the tree grows level by level: the product corrects the logits of a depth by the token
    above. With a cell, it grows node by node: the cell refines the likeliest tokens of a depth below each
    node.

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
        config, cell = served.head.config, served.head.refiner
        shape = config.size, nodes, branch, width if config.markov_rank else None
        super().__init__(target, served, config.block, *shape)
        self.refined: RefinedTrees | None = None
        if cell is not None:
            self.refined = RefinedTrees(self.head, cell, self.shared, target.ops, self.max_nodes)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.refined is None:
            return super().propose(requests)
        return draft_ready(requests, self.ready, partial(self._refine, self.refined))

    def _refine(self, refined: RefinedTrees, ready: Sequence[Request]) -> list[DraftTree]:
        """Trees whose guesses the cell refines. Those of one call have the same number of depths."""
        outputs = self.guessing(ready)
        trees: dict[Request, DraftTree] = {}
        for depth in {len(rows) for rows in outputs}:
            some = {r: rows for r, rows in zip(ready, outputs, strict=True) if len(rows) == depth}
            roots = torch.tensor([int(r.tokens[-1]) for r in some], device=outputs[0].device)
            embedded = self.head.embedded(roots, self.shared)
            rows, read, states = refined.cell.begin(torch.stack([*some.values()]), embedded)
            head_outputs = HeadOutputs(self.head.logits(rows, self.shared), read, states)
            trees.update(zip(some, refined.trees([*some], head_outputs), strict=True))
        return [trees[request] for request in ready]

    def embed(self, tokens: Tensor) -> Tensor:
        """See `MaskRowsDrafter`."""
        return self.shared.embed(tokens)

    def learned_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """See `MaskRowsDrafter`."""
        return self.head.queries[:count, 0], self.head.queries[:count, 1]

    def correct(self, rows: PathRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `OnePassDrafter`."""
        return self.head.correct(rows.logits, tokens), rows.states
