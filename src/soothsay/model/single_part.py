"""A layer that is one part (Nemotron-H; NVIDIA 2025, arXiv 2504.03624)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.model.attention_layer import attention_of
from soothsay.model.feed_forward import dtype_of, feed_forward
from soothsay.model.kernels import Kernels
from soothsay.model.norm import RMSNorm


class SinglePart(nn.Module):
    """Attention, what takes its place, or a feed-forward part. It reads the normed stream, and adds to it."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.rope_number = int(layer in config.second_rope_layers)
        """See `Block`."""
        self.kernels = kernels
        self.part_norm = RMSNorm(config.hidden_size, config.norm_eps)
        has_attention = config.has_attention(layer)
        self.attention = attention_of(config, layer, kernels) if has_attention else None
        self.mlp = None if has_attention else feed_forward(config, layer, kernels)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of its linear layers' outputs."""
        if self.attention is None:
            return dtype_of(cast(nn.Module, self.mlp))
        return cast(torch.dtype, self.attention.o.dtype)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        kv: LayerMemory | None,
        inputs: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """`[N, hidden] -> [N, hidden]`, float32. For the arguments see `Block`. The last two are not used."""
        normed = self.kernels.norm(x, self.part_norm, self.dtype)
        if self.attention is not None:
            delta = self.attention(normed, rope, batch, kv)
        else:
            delta = cast(nn.Module, self.mlp)(normed)
        return self.kernels.add(x, delta, None)
