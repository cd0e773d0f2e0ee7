"""EAGLE and EAGLE-2: one decoder block continues the target's features, and with them its words.

EAGLE (Li et al. 2024, arXiv 2401.15077) fills a fixed tree, EAGLE-2 (Li et al. 2024, arXiv 2406.16858) grows
one by confidence with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.drafters.base import Target
from soothsay.drafters.grown import Confident, Fixed, RecurrentDrafter
from soothsay.drafters.head import Head, RecurrentHead, load_head
from soothsay.drafters.template import EAGLE_TEMPLATE
from soothsay.engine.batch import Batch
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.rope import Rope
from soothsay.model.transformer import Block


@dataclass(frozen=True)
class EagleConfig:
    """What a checkpoint computes. It shares embedding and output head with the target."""

    block: ModelConfig
    """Of its decoder block, which is as wide as the target's; `num_layers` is 1."""

    bias: bool
    """Whether the layer that joins embedding and feature has one."""

    target_layers: int
    """Decoder blocks of the target, whose last output, normed, is the feature."""


class EagleHead(RecurrentHead):
    """One decoder block without a norm before its attention; its output is a guess of the next feature."""

    method = "eagle"
    config: EagleConfig

    def __init__(self, config: EagleConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels = config, kernels
        self.taps = (config.target_layers,)
        self.fc: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size, bias=config.bias)
        self.block = Block(c, 0, kernels, c.hidden_size)
        self.rope = Rope(c.rope, c.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of what its linear layers give, and of its KV."""
        return self.block.dtype

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`; the output is the next feature."""
        x = cast(Tensor, self.fc(torch.cat([embedded, features], dim=-1)))
        out: Tensor = self.block(x.float(), self.rope(batch.positions), batch, kv, x)
        return out


class Eagle(RecurrentDrafter):
    """EAGLE: its 25 guesses hang in the same places at every step.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle` beside the target's weights.
        dtype: the head's, as in `LLM`; "auto" is the target's.
        template: the tree, as paths of ranks, those above before those below them.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        dtype: DType = "auto",
        template: Sequence[Sequence[int]] = EAGLE_TEMPLATE,
    ):
        super().__init__(target, load_head(EagleHead, model, target, dtype), Fixed(template))


class Eagle2(RecurrentDrafter):
    """EAGLE-2: the likeliest guesses of each level are explored further, and the best of all are verified.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle` beside the target's weights.
        depth: tokens that are guessed in a row.
        width: nodes of each level that are explored further; None: as many as the largest tree has room for.
        branch: likeliest tokens proposed below each of them; None: one more than `width`.
        dtype: the head's, as in `LLM`; "auto" is the target's.
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
        shape = Confident.within("eagle2", target, depth, width, branch)
        served = load_head(EagleHead, model, target, dtype)
        super().__init__(target, served, shape)
