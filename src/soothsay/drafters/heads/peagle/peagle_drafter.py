"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 that predicts all depths in one pass."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.one_pass_drafter import MaskRowsDrafter
from soothsay.drafters.heads.peagle.peagle_head import PEagleHead
from soothsay.drafters.heads.serving import load_head


class PEagle(MaskRowsDrafter[PEagleHead]):
    """Predicts all depths in one pass, and makes the best tree by their probabilities.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/peagle` beside the target's weights.
        depth: number of guesses in one pass; None: what the checkpoint says, or 8.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth that may be in the tree.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | PEagleHead = "",
        depth: int | None = None,
        nodes: int = 63,
        branch: int = 8,
        dtype: DType = "auto",
    ):
        check_at_least_one("peagle", depth=1 if depth is None else depth, nodes=nodes, branch=branch)
        served = load_head(PEagleHead, model, target, dtype)
        config = served.head.config
        super().__init__(target, served, config.first.block, depth or config.depth, nodes, branch)
        with torch.no_grad():
            self.mask_row = self.head.mask_row(self.shared)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `MaskRowsDrafter`."""
        return self.head.first.embed(tokens, self.shared)

    def learned_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """See `MaskRowsDrafter`. All rows are the same."""
        return self.mask_row
