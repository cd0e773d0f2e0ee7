"""EAGLE's module (Li et al. 2024, arXiv 2401.15077): one decoder block over the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.batch import Batch
from soothsay.drafters.heads.trained_head import RecurrentHead
from soothsay.model.blocks import Block
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.rope import Rope


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of EAGLE's head, which shares the target's embedding and output head."""

    block: ModelConfig
    """The decoder block's. Its hidden size is that of the features; `num_layers` is 1."""

    bias: bool
    """Whether the layer that joins embedding and feature has a bias."""

    target_layers: int
    """Number of the target's decoder blocks. The feature is the normed output of the last one."""


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
        """Dtype of the linear layers' outputs, and of the KV."""
        return self.block.dtype

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`. The output is a guess of the next feature."""
        x = cast(Tensor, self.fc(torch.cat([embedded, features], dim=-1)))
        out: Tensor = self.block(x.float(), self.rope(batch.positions), batch, kv, x)
        return out
