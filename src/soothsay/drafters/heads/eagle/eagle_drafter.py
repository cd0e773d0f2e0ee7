"""EAGLE: one decoder block guesses the target's next features, and with them its next tokens.

EAGLE (Li et al. 2024, arXiv 2401.15077) fills a fixed tree. EAGLE-2 (Li et al. 2024, arXiv 2406.16858) has
the same weights, and grows a tree by confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.eagle.eagle_head import EagleHead
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter, RecurrentDrafter
from soothsay.drafters.heads.serving import load_head
from soothsay.drafters.heads.trained_head import Head
from soothsay.drafters.trees.templates import EAGLE_TEMPLATE
from soothsay.drafters.trees.tree_shapes import TemplateShape


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


class Eagle2(ConfidentDrafter):
    """EAGLE-2: EAGLE's head, with a tree that grows by confidence."""

    method, kind = "eagle2", EagleHead
