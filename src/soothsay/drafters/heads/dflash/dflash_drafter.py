"""DFlash and its kin: a block of masks after the last token is filled in one pass.

It reads DFlash (2026, arXiv 2602.06036), DFlash2, DSpark, xPress and JetSpec (2026, arXiv 2606.18394). The
checkpoint says which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.dflash.dflash_head import DFlashHead
from soothsay.drafters.heads.dflash.draft_blocks import BlockPacker, scratch_pool
from soothsay.drafters.heads.dflash.path_heads import PathHead
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter, PathRows
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.own_kv import DraftPass


class DFlash(OnePassDrafter[DFlashHead]):
    """Fills a block of masks in one pass over the target's features, and makes trees of the likeliest tokens.

    Keys and values of committed tokens come from features alone. Those of the block are kept in scratch
    slots during the pass. Without a path head, the tree is the best one by the probabilities of the depths.
    With one (DFlash2, DSpark, xPress), it grows level by level, and each node's tokens are guessed by its
    path.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/dflash` beside the target's weights.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, where the tree grows level by level; None: an eighth of
            the largest tree, and at least 4.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | DFlashHead = "",
        nodes: int = 63,
        branch: int = 8,
        width: int | None = None,
        dtype: DType = "auto",
    ):
        width = max(target.config.max_tree // 8, 4) if width is None else width
        check_at_least_one("dflash", nodes=nodes, branch=branch, width=width)
        served = load_head(DFlashHead, model, target, dtype)
        head, c = served.head, served.head.config
        rows = max(target.config.max_rows, 1 + c.size)  # a pass has room for a block and a token before it
        pool = scratch_pool(target, c.block, head.dtype, rows)
        shape = c.num_guesses, nodes, branch, None if head.path_head is None else width
        super().__init__(target, served, pool, *shape)
        self.kv.max_rows, self.path_head = rows, head.path_head or PathHead()
        self.packer = BlockPacker(target, c.size, c.mask, c.sights, c.block.group)

    def predict(self, requests: Sequence[Request]) -> PathRows:
        """See `OnePassDrafter`."""
        blocks = torch.stack(self.outputs(dict.fromkeys(requests, self.head.config.size)))  # [R, B, H]
        read, device = self.path_head.read(blocks), blocks.device
        roots = torch.tensor([int(r.tokens[-1]) for r in requests], device=device)
        before = torch.tensor([int(r.tokens[max(len(r.tokens) - 2, 0)]) for r in requests], device=device)
        return PathRows(
            self.head.logits(self._guessing(blocks, requests), self.shared),
            self._guessing(read, requests),
            self.places(requests),
            self.path_head.begin(read, roots, before),
        )

    def correct(self, rows: PathRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `OnePassDrafter`."""
        return self.path_head.step(rows.logits, rows.read, tokens, rows.states)

    def _guessing(self, blocks: Tensor, requests: Sequence[Request]) -> Tensor:
        """The rows that guess, as many as trees have room for: `[R, B, n] -> [D_1 + D_2 + ..., n]`."""
        first = self.head.config.size - self.head.config.num_guesses
        depths = [self.depth_for(request) for request in requests]
        return torch.cat([block[first : first + d] for block, d in zip(blocks, depths, strict=True)])

    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass: `[B, H]` normed outputs of each block."""
        place = self.packer.pack(batch.rows)
        embedded = self.head.embed(place.tokens, self.shared)
        return [*self.head(torch.cat(batch.features), embedded, place, self.kv.pool.layers)]
