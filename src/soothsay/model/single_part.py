"""A layer that is one part (Nemotron-H; NVIDIA 2025, arXiv 2504.03624)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.model.feed_forward import dtype_of
from soothsay.model.kernels import Kernels
from soothsay.model.norm import RMSNorm
from soothsay.model.parts import build_mixer, build_mlp
from soothsay.model.specs.model_spec import LayerSpec


class SinglePart(nn.Module):
    """Attention, what takes its place, or a feed-forward part. It reads the normed stream, and adds to it."""

    def __init__(self, spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        self.rope_number, self.kernels = rope_number, kernels
        self.part_norm = RMSNorm(hidden, spec.norm.eps, centred=spec.norm.centred)
        self.attention = None if spec.mixer is None else build_mixer(spec.mixer, hidden, kernels)
        self.mlp = None if spec.mlp is None else build_mlp(spec.mlp, hidden, spec.norm, kernels)

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
