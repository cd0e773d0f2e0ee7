"""A layer that is one part (Nemotron-H; NVIDIA 2025, arXiv 2504.03624)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.model.decoder.decoder_block import DecoderBlock, dtype_of
from soothsay.model.decoder.feed_forward import part_dtype
from soothsay.model.decoder.layer_pass import LayerPass
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.parts import build_mixer, build_mlp
from soothsay.model.ops.kernels import Kernels
from soothsay.model.specs.model_spec import LayerSpec


class SinglePart(DecoderBlock):
    """Attention, what takes its place, or a feed-forward part. It reads the normed stream, and adds to it."""

    def __init__(self, spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        self.rope_number, self.kernels, self.width = rope_number, kernels, hidden
        self.part_norm = RMSNorm(hidden, spec.norm.eps, centred=spec.norm.centred)
        self.attention = None if spec.mixer is None else build_mixer(spec.mixer, hidden, kernels)
        self.mlp = None if spec.mlp is None else build_mlp(spec.mlp, hidden, spec.norm, kernels)

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
