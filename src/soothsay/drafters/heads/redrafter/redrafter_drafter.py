"""Drafts by one look at the target's features and a recurrent cell.

The cell is that of ReDrafter (Cheng et al. 2024, arXiv 2403.09919).
A gated layer reads the features of the token before the root, and the root's token. It predicts all depths at
once. The cell refines these guesses along each path, so a tree costs little more than its root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter, draft_ready
from soothsay.drafters.heads.redrafter.redrafter_head import RedrafterHead
from soothsay.drafters.heads.refiner import RefinedTrees
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.ops.draft_ops import HeadOutputs


class Redrafter(LastFeatureDrafter[RedrafterHead]):
    """Looks once, and grows the best tree of the guesses as the cell refines them.

    Args:
        target: the model to draft for.
        model: a directory with the head, or a `RedrafterHead`; "" is `drafters/redrafter` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        dtype: element type of the head's linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | RedrafterHead = "",
        nodes: int = 63,
        dtype: DType = "auto",
    ):
        check_at_least_one("redrafter", nodes=nodes)
        super().__init__(target, load_head(RedrafterHead, model, target, dtype))
        self.max_nodes = 1 + nodes
        self.refined = RefinedTrees(self.head, self.head.refiner, self.shared, target.ops, self.max_nodes)
        self._at_once = self.head.outputs_at_once(target.ops)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose feature is known, and the root alone for the others."""
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        roots = torch.tensor([int(r.tokens[-1]) for r in ready], device=self.target.model.device)
        embedded = self.head.embedded(roots, self.shared)
        return self.refined.trees(ready, self._outputs(self.features.stacked(ready), embedded))

    def _outputs(self, features: Tensor, embedded: Tensor) -> HeadOutputs:
        if self._at_once is None:
            return self.head.outputs(features, embedded, self.shared)
        outputs = self._at_once(features, embedded)
        return outputs._replace(logits=self.shared.finished(outputs.logits))
