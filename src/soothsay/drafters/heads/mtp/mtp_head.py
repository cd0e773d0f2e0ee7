"""The modules of multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437)."""

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
from soothsay.model.norm import RMSNorm
from soothsay.model.rope import Rope


@dataclass(frozen=True)
class MTPConfig:
    """Configuration of MTP modules, which share the target's embedding and output head."""

    block: ModelConfig
    """The decoder block's of each module. `num_layers` is the number of modules."""

    target_layers: int
    """Number of the target's decoder blocks. The first module reads the output of the last one."""

    hidden_first: bool = False
    """Whether the projection reads cat[hidden, embedding] (MiMo) instead of cat[embedding, hidden]."""

    zero_first: bool = False
    """Whether the first row's embedding is zero (DeepSeek, GLM, MiMo)."""


class MTPModule(nn.Module):
    """One module: a decoder block over a token's embedding and the hidden state before it, each normed."""

    def __init__(self, config: MTPConfig, layer: int, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels = config, kernels
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.projection: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size)
        self.block = Block(c, layer, kernels)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Tensor | None
    ) -> Tensor:
        """Embeddings `[N, H]` and normed states before the tokens `[N, H]` -> `[N, H]` normed, float32."""
        dtype = self.block.dtype
        parts = [
            self.kernels.norm(embedded, self.embedding_norm, dtype),
            self.kernels.norm(hidden, self.hidden_norm, dtype),
        ]
        x = self.projection(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        return self.kernels.norm(self.block(x.float(), rope, batch, kv), self.norm, torch.float32)


class MTPHead(RecurrentHead):
    """The modules, first to last. The last one makes all further guesses, too."""

    method = "mtp"
    config: MTPConfig

    def __init__(self, config: MTPConfig, kernels: Kernels):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        self.rope = Rope(config.block.rope, config.block.head_dim, config.block.rotary_dim)
        self.steps = nn.ModuleList(
            MTPModule(config, layer, kernels) for layer in range(config.block.num_layers)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear layers' outputs, and of the KV."""
        return cast(MTPModule, self.steps[0]).block.dtype

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """Run module `step`, see `RecurrentHead`. Outputs are normed: they are inputs of the output head."""
        if self.config.zero_first:
            embedded = embedded.masked_fill((batch.positions == FIRST_ROW)[:, None], 0.0)
        out: Tensor = self.steps[step](embedded, features, self.rope(batch.positions), batch, kv)
        return out


FIRST_ROW = 1
"""Position of a request's first row. Row 0 would read the feature of a token before the first."""
