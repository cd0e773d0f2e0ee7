"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which reads the tokens above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import StateGrownDrafter
from soothsay.drafters.heads.hydra.hydra_head import HydraHead
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.growth import GrowingTree
from soothsay.drafters.trees.tree_shapes import ConfidentShape


class Hydra(StateGrownDrafter[HydraHead]):
    """Grows trees with Hydra's heads: head k reads the feature and the k tokens on the path to a node.

    A node's state is the vector that its head reads: `[(k + 1) * H]`, the feature of the token
    before the root and the embeddings of the path's tokens, the root included.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `HydraHead`; "" is `drafters/hydra` beside the target.
        width: nodes of each level that are expanded; None: as many as the largest tree has room for.
        branch: likeliest tokens that are added below each of them; None: one more than `width`.
        dtype: element type of the heads' linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | HydraHead = "",
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        served = load_head(HydraHead, model, target, dtype)
        shape = ConfidentShape.within("hydra", target, served.head.config.num_heads, width, branch)
        super().__init__(target, served, shape)

    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Append the frontiers' tokens to their parents' states, `[M, k * H]`, and run the next head."""
        tokens = [token for g in growing for token in g.frontier_tokens]
        embedded = self.shared.embed(torch.tensor(tokens, dtype=torch.int64, device=above.device))
        read = torch.cat([above, embedded], dim=-1)
        parts = read.view(len(read), -1, self.head.config.hidden_size)
        return self.shared.logits(self.head(parts[:, 0], parts[:, 1:])), read
