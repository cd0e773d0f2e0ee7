"""Trained heads made ready to draft: converted to the target's kernels, joined to the target's features.

A head usually reads whole features, and shares the target's embedding, last norm and output head. A head
with a `FeatureView` reads a part of each feature, and brings its own embedding, last norm and output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.model.blocks import fuse
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels, StockKernels
from soothsay.model.linear import Dense
from soothsay.model.norm import RMSNorm
from soothsay.model.numeric_mode import NumericMode
from soothsay.model.transformer import Transformer

AnyHead = TypeVar("AnyHead", bound=Head)
ServedHead = TypeVar("ServedHead", bound=Head, covariant=True)


def kernels_for(config: ModelConfig, own: Kernels) -> Kernels:
    """`own`, the target's kernels, if they can compute modules of these sizes; else stock operations."""
    return own if own.fit(config) else StockKernels()


def serve(
    head: AnyHead,
    kernels: Kernels,
    dtype: torch.dtype,
    bits: int | None = None,
    output_bits: int | None = None,
) -> AnyHead:
    """Make a head ready to draft: convert its linear layers to the kinds that `kernels` are fast at.

    Args:
        head: is changed in place; it can no longer be trained or written.
        kernels: the target's.
        dtype: what the linear layers compute in.
        bits: round their weights to integers of this size; None: do not round.
        output_bits: the same for its output head, which a draft reads most; None: as for the others.

    Returns:
        `head`.
    """
    inner, output = NumericMode(dtype, bits), NumericMode(dtype, output_bits or bits, coarse=True)
    for name, module in list(head.named_modules()):
        if isinstance(module, Dense):
            is_output = name.split(".")[-1] == "head"
            weight = (output if is_output else inner).convert(name, module.weight.detach())
            bias = None if module.bias is None else module.bias.detach().to(dtype)
            out = torch.float32 if is_output else dtype
            head.set_submodule(name, kernels.linear(weight, bias, out))
    fuse(head)
    return head.eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class FeatureView:
    """The part of the target's features that a head reads, and the ends that belong to this part.

    The head reads the first H dimensions of each feature, divided by `scale`. The target's embedding, last
    norm and output head do not fit H dimensions, so the view has its own. V is the target's vocabulary.
    """

    target_hidden_size: int
    """Dimensions of the features of the target that the head was made for."""

    scale: float

    embedding: Tensor
    """`[V, H]` in the dtype that it is stored in."""

    embedding_scale: float
    """Rows of the embedding are multiplied by this number."""

    norm: Tensor
    """`[H]` float32: the weight of the last norm."""

    norm_eps: float

    head: Tensor
    """`[V, H]`: the output head. It may be `embedding` itself."""

    @property
    def size(self) -> int:
        """H."""
        return len(self.norm)

    def cut(self, taps: Sequence[Tensor]) -> list[Tensor]:
        """The part of each feature, `[N, H_target] -> [N, H]` float32."""
        if self.scale == 1.0:
            return [tap[:, : self.size].contiguous() for tap in taps]
        return [tap[:, : self.size] / self.scale for tap in taps]

    def ends(self, target: Transformer) -> TargetEnds:
        """The view's ends, which compute in the dtype of `target`."""
        kernels = kernels_for(replace(target.config, hidden_size=self.size), target.kernels)
        mode = NumericMode(target.dtype, target.bits)
        norm = RMSNorm(self.size, self.norm_eps)
        norm.weight = nn.Parameter(self.norm)
        head = kernels.linear(mode.convert("head", self.head), None, torch.float32)
        embedding, c = Embedding(self.embedding, self.embedding_scale), target.config
        ends = TargetEnds(embedding, norm, head, kernels, c.logit_scale, c.logit_softcap)
        return ends.to(target.device).requires_grad_(False)


@dataclass(frozen=True)
class Served(Generic[ServedHead]):
    """A head that is ready to draft for a target."""

    head: ServedHead
    shared: TargetEnds
    """The embedding, last norm and output head that the head works with."""

    view: FeatureView | None = None
    """None: the head reads whole features."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads."""
        return self.head.taps

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The part of the target's features to keep: `[N, H_target]` for each tap -> `[N, H]` float32."""
        return self.head.fuse(taps if self.view is None else self.view.cut(taps), self.shared)
