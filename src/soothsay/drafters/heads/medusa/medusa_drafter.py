"""Medusa (Cai et al. 2024, arXiv 2401.10774): small heads on one hidden state of the target.

Each head predicts a token one further ahead than the head before it. No head knows what the others predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Observation, Target
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter, draft_ready
from soothsay.drafters.heads.medusa.medusa_head import MedusaHead
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.templates import TreeLayout


class Medusa(LastFeatureDrafter[MedusaHead]):
    """Makes trees of the likeliest tokens of Medusa's heads.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `MedusaHead`; "" is `drafters/medusa` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens of each head that may be in the tree.
        tree: "best-first" chooses nodes in each step by the heads' probabilities, "static" takes one tree for
            all steps, and "measured" fits that tree to the acceptance so far.
        dtype: element type of the heads' linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | MedusaHead = "",
        nodes: int = 63,
        branch: int = 10,
        tree: str = "best-first",
        dtype: DType = "auto",
    ):
        super().__init__(target, load_head(MedusaHead, model, target, dtype))
        depth, ops = self.head.config.num_heads, target.model.kernels.sampling
        self.layout = TreeLayout(tree, depth, branch, nodes, ops)
        self.max_nodes = 1 + nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose feature is known, and the root alone for the others."""
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        logits = self.head.guesses(self.features.stacked(ready), self.shared)  # [R, heads, V]
        return self.layout.trees(ready, logits.flatten(0, 1), [self.head.config.num_heads] * len(ready))

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the heads read next, and count which tokens were right."""
        super().observe(observations)
        self.layout.observe(observations)

    def release(self, request: Request) -> None:
        """Forget a request."""
        super().release(request)
        self.layout.release(request)
