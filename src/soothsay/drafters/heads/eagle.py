"""EAGLE and EAGLE-2: one decoder block guesses the target's next features, and with them its next tokens.

EAGLE (Li et al. 2024, arXiv 2401.15077) fills a fixed tree. EAGLE-2 (Li et al. 2024, arXiv 2406.16858) has
the same weights, and grows a tree by confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.loading import load_head
from soothsay.drafters.heads.modules.base import Head
from soothsay.drafters.heads.modules.eagle import EagleHead
from soothsay.drafters.heads.recurrent import RecurrentDrafter
from soothsay.drafters.trees.shapes import ConfidentShape, TemplateShape
from soothsay.drafters.trees.template import EAGLE_TEMPLATE


class Eagle(RecurrentDrafter):
    """EAGLE: a tree with the same shape at every step.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle` beside the target's weights.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
        template: the tree as paths of ranks, each parent before its children.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        dtype: DType = "auto",
        template: Sequence[Sequence[int]] = EAGLE_TEMPLATE,
    ):
        super().__init__(target, load_head(EagleHead, model, target, dtype), TemplateShape(template))


class Eagle2(RecurrentDrafter):
    """EAGLE-2: the likeliest nodes of each level get children, and the best nodes of all are verified.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle` beside the target's weights.
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
        shape = ConfidentShape.within("eagle2", target, depth, width, branch)
        served = load_head(EagleHead, model, target, dtype)
        super().__init__(target, served, shape)
