"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder block over features of several layers.

Its output head is its own, and may be limited to the most frequent tokens.
"""

from __future__ import annotations

from pathlib import Path

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.loading import load_head
from soothsay.drafters.heads.modules.base import Head
from soothsay.drafters.heads.modules.eagle3 import Eagle3Head
from soothsay.drafters.heads.recurrent import RecurrentDrafter
from soothsay.drafters.trees.shapes import ConfidentShape


class Eagle3(RecurrentDrafter):
    """EAGLE-3 with EAGLE-2's tree: the likeliest nodes of each level get children.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle3` beside the target's weights.
        depth: levels of the tree.
        width: nodes of each level that get children; None: as many as the largest tree has room for.
        branch: children of each of these nodes; None: one more than `width`.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        depth: int = 8,
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        shape = ConfidentShape.within("eagle3", target, depth, width, branch)
        served = load_head(Eagle3Head, model, target, dtype)
        super().__init__(target, served, shape)
