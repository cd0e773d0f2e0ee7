"""A layer that is one part (Nemotron-H; NVIDIA 2025, arXiv 2504.03624)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.model.attention_layer import attention_of
from soothsay.model.decoder_block import DecoderBlock, dtype_of
from soothsay.model.feed_forward import feed_forward, part_dtype
from soothsay.model.kernels import Kernels
from soothsay.model.layer_pass import LayerPass
from soothsay.model.norm import RMSNorm


class SinglePart(DecoderBlock):
    """Attention, what takes its place, or a feed-forward part. It reads the normed stream, and adds to it."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.rope_number = int(layer in config.second_rope_layers)
        self.kernels, self.width = kernels, config.hidden_size
        self.part_norm = RMSNorm(config.hidden_size, config.norm_eps)
        has_attention = config.has_attention(layer)
        self.attention = attention_of(config, layer, kernels) if has_attention else None
        self.mlp = None if has_attention else feed_forward(config, layer, kernels)

    @property
    def dtype(self) -> torch.dtype:
        """See `DecoderBlock`."""
        return part_dtype(cast(nn.Module, self.mlp)) if self.attention is None else dtype_of(self.attention.o)

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """See `DecoderBlock`."""
        normed = ops.norm(x, self.part_norm, self.dtype)
        if self.attention is not None:
            return ops.add(x, self.attention(ops, normed, at), None)
        return ops.add(x, cast(nn.Module, self.mlp)(ops, normed), None)
