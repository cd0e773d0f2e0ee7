"""Gemma 4's assistants (Google 2026, "multi-token prediction drafters"): they read the target's KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.batch import Batch
from soothsay.core.paths import Path as KeyPath
from soothsay.core.request import Request
from soothsay.drafters.base import Target
from soothsay.drafters.heads.assistant.assistant_head import AssistantHead
from soothsay.drafters.heads.feature_drafter import StateGrownDrafter
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.growth import GrowingTree
from soothsay.drafters.trees.tree_shapes import ConfidentShape
from soothsay.errors import DrafterError


class Assistant(StateGrownDrafter[AssistantHead]):
    """Drafts with a small decoder that has no keys and values of its own.

    Each of its layers attends to those of one of the target's layers. So nothing is computed for a prompt.
    For each request, only the target's last output is kept. It drafts if all committed tokens but the last
    have the target's KV.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/assistant` beside the target's weights.
        depth: number of tokens that are drafted in a row.
        width: nodes of each level that are expanded; None: as many as the largest tree has room for.
        branch: likeliest tokens that are added below each of them; None: one more than `width`.
        dtype: element type of the assistant, as in `LLM`; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | AssistantHead = "",
        depth: int = 6,
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        shape = ConfidentShape.within("assistant", target, depth, width, branch)
        super().__init__(target, load_head(AssistantHead, model, target, dtype), shape)
        pool = target.pool
        block, sources = self.head.config.block, target.model.config.last_kv_layers
        needed = [sources[window is None] for window in block.windows]
        if not all(layer in target.model.own.layers for layer in needed):
            raise DrafterError("assistant reads keys and values that another stage of the model has")
        self.kv = [pool.kv(layer) for layer in needed]

    def ready(self, request: Request) -> bool:
        """Return whether the root can be computed, see `Expander`."""
        return request.num_pending == 1 and len(request.tokens) > 1 and super().ready(request)

    @torch.inference_mode()
    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the frontiers: logits `[M, V]`, and outputs `[M, H_target]`, which are the states."""
        batch = self.lay_out(growing)
        states, logits = self.head(self.shared.embed(batch.tokens), above, batch, self.kv)
        return logits, states

    def lay_out(self, growing: Sequence[GrowingTree]) -> Batch:
        """Lay out the frontiers as rows of a pass. Rows see all KV of their request, and no other row."""
        size, block = self.target.config.block_size, self.head.config.block
        paths, positions, count = list[KeyPath](), list[int](), 0
        for g in growing:
            known = len(g.request.tokens) - 1  # tokens with KV
            offsets, rows = np.arange(known), range(count, count := count + len(g.frontier))
            keys = g.request.table[offsets // size] * size + offsets % size
            paths.append(KeyPath(rows, np.full(len(rows), known - 1), keys))
            positions += [known] * len(rows)
        device = self.target.model.device
        rows_of_all = torch.arange(count, device=device)
        return Batch(
            tokens=torch.tensor([token for g in growing for token in g.frontier_tokens], device=device),
            positions=torch.tensor(positions, device=device),
            slots=rows_of_all,  # nothing is written
            logit_rows=rows_of_all,
            asked=(),
            paths=tuple(paths),
            num_slots=0,
            group=block.group,
            windows=block.windows,
        )
