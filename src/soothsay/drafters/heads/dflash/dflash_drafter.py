"""DFlash and its kin: a block of masks after the last token is filled in one pass.

It reads DFlash (2026, arXiv 2602.06036), DFlash2, DSpark, xPress and JetSpec (2026, arXiv 2606.18394). The
checkpoint says which one it is.
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
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.dflash.dflash_head import DFlashHead
from soothsay.drafters.heads.dflash.draft_blocks import BlockPacker, scratch_pool
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.growth import GrowingTree, TreeGrower, parent_rows
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.drafters.trees.tree_shapes import ConfidentShape


@dataclass(frozen=True, slots=True)
class _NodeRows:
    """What the trees' next level needs."""

    marginals: Tensor  # [D_1 + D_2 + ..., V_short] logits of the one pass, a row for each depth of a request
    read: Tensor  # [D_1 + D_2 + ..., n], what the path head reads of the outputs
    places: Tensor  # [M] int64, for each node, the row of the tokens below it
    states: Tensor  # [M, ...], of the path head


class DFlash(OnePassDrafter):
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
        self.head = head = served.head
        c = head.config
        rows = max(target.config.max_rows, 1 + c.size)  # a pass has room for a block and a token before it
        pool = scratch_pool(target, c.block, head.dtype, rows)
        super().__init__(target, served, pool, c.num_guesses, nodes, branch)
        self.kv.max_rows = rows
        self.packer = BlockPacker(target, c.size, c.mask, c.sights, c.block.group)
        shape = ConfidentShape(c.num_guesses, width, branch)
        self.grower = TreeGrower(shape, target.model.kernels, self.max_nodes)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.head.path_head is None:
            return super().propose(requests)
        return self.grower.grow(self, requests, self.min_level_gain)

    def marginals(self, requests: Sequence[Request]) -> list[Tensor]:
        """See `OnePassDrafter`."""
        outputs = self._guessing(self._blocks(requests), requests)
        logits = self.head.whole(self.head.logits(outputs, self.shared), self.shared.vocab_size)
        return [*torch.split(logits, [self.depth_for(request) for request in requests])]

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, _NodeRows]:
        """Compute the one pass, see `Expander`."""
        path_head, requests = self.head.path_head, [g.request for g in growing]
        assert path_head is not None
        blocks = self._blocks(requests)
        read, device = path_head.read(blocks), blocks.device
        roots = torch.tensor([int(r.tokens[-1]) for r in requests], device=device)
        before = torch.tensor([int(r.tokens[max(len(r.tokens) - 2, 0)]) for r in requests], device=device)
        begins = [*accumulate((self.depth_for(request) for request in requests[:-1]), initial=0)]
        rows = _NodeRows(
            self.head.logits(self._guessing(blocks, requests), self.shared),
            self._guessing(read, requests),
            torch.tensor(begins, device=device),
            path_head.begin(read, roots, before),
        )
        return self._step(growing, rows)

    def expand_nodes(self, growing: Sequence[GrowingTree], states: _NodeRows) -> tuple[Tensor, _NodeRows]:
        """Take the next depth's logits, one row after those of the parents. See `Expander`."""
        above = parent_rows(growing, states.places.device)
        places = states.places.index_select(0, above) + 1
        return self._step(
            growing, _NodeRows(states.marginals, states.read, places, states.states.index_select(0, above))
        )

    def _step(self, growing: Sequence[GrowingTree], rows: _NodeRows) -> tuple[Tensor, _NodeRows]:
        """Return `[M, V]` logits below the frontiers' tokens, and the frontiers' states."""
        assert self.head.path_head is not None
        tokens = torch.tensor([t for g in growing for t in g.frontier_tokens], device=rows.places.device)
        logits, states = self.head.path_head.step(
            rows.marginals.index_select(0, rows.places),
            rows.read.index_select(0, rows.places),
            tokens,
            rows.states,
        )
        below = _NodeRows(rows.marginals, rows.read, rows.places, states)
        return self.head.whole(logits, self.shared.vocab_size), below

    def _blocks(self, requests: Sequence[Request]) -> Tensor:
        """Compute the pass: `[R, B, H]` normed outputs of the requests' blocks."""
        return torch.stack(self.outputs(dict.fromkeys(requests, self.head.config.size)))

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
