"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 that predicts all depths in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter
from soothsay.drafters.heads.peagle.peagle_head import PEagleHead
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.own_kv import DraftPass, own_pool, pack


class PEagle(OnePassDrafter):
    """Predicts all depths in one pass, and makes the best tree by their probabilities.

    The KV of mask rows is at the slots of the next tokens, which overwrite it.

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
        self.head = head = served.head
        self.block = head.config.first.block
        depth = head.config.depth if depth is None else depth
        super().__init__(target, served, own_pool(target, self.block, head.dtype), depth, nodes, branch)
        with torch.no_grad():
            self.mask_row = head.mask_row(self.shared)

    def marginals(self, requests: Sequence[Request]) -> list[Tensor]:
        """See `OnePassDrafter`."""
        outputs = self.outputs({request: self.depth_for(request) - 1 for request in requests})
        logits = self.head.logits(torch.cat(outputs), self.shared)
        return [*torch.split(logits, [len(rows) for rows in outputs])]

    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass: `[D, H]` outputs of each root and the mask rows after it."""
        packed, begin = pack(batch.rows, self.target, self.block), 0
        embedded = self.head.first.embed(packed.tokens, self.shared)
        features = torch.empty_like(embedded)
        for rows, read in zip(batch.rows, batch.features, strict=True):
            masks, end = begin + len(rows.tokens), begin + rows.num_rows
            features[begin:masks] = read
            embedded[masks:end], features[masks:end] = self.mask_row
            begin = end
        out: Tensor = self.head(embedded, features, packed, self.kv.pool.layers)
        counts = [len(rows.tree) for rows in batch.rows if rows.tree is not None]
        return [*torch.split(packed.select_logit_rows(out), counts)]
