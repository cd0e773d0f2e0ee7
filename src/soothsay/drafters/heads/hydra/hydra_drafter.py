"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which reads the tokens above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter
from soothsay.drafters.heads.hydra.hydra_head import HydraHead
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.trees.growth import GrowingTree, GrownDrafter, parent_rows
from soothsay.drafters.trees.tree_shapes import ConfidentShape


class Hydra(LastFeatureDrafter[HydraHead], GrownDrafter[Tensor]):
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
        LastFeatureDrafter.__init__(self, target, load_head(HydraHead, model, target, dtype))
        shape = ConfidentShape.within("hydra", target, self.head.config.num_heads, width, branch)
        GrownDrafter.__init__(self, target, shape)

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, Tensor]:
        """Run the first head, see `Expander`."""
        return self._expand(growing, self.features.stacked([g.request for g in growing]))

    def expand_nodes(self, growing: Sequence[GrowingTree], states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the next head at the frontiers, see `Expander`."""
        return self._expand(growing, states.index_select(0, parent_rows(growing, states.device)))

    def _expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Append the frontiers' tokens to `[M, k * H]` states of their parents, and run the next head."""
        tokens = [token for g in growing for token in g.frontier_tokens]
        embedded = self.shared.embed(torch.tensor(tokens, dtype=torch.int64, device=above.device))
        read = torch.cat([above, embedded], dim=-1)
        parts = read.view(len(read), -1, self.head.config.hidden_size)
        return self.shared.logits(self.head(parts[:, 0], parts[:, 1:])), read
