"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder block over features of several of the target's
layers, with an output head of its own for the tokens that matter.
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
from soothsay.drafters.grown import Confident, RecurrentDrafter
from soothsay.drafters.head import Head, RecurrentHead, Shared, load_head
from soothsay.engine.batch import Batch
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, normal
from soothsay.model.rope import Rope
from soothsay.model.transformer import Block, Embedding, RMSNorm


@dataclass(frozen=True)
class Eagle3Config:
    """What a checkpoint computes."""

    block: ModelConfig
    """Of its decoder block; `num_layers` is 1 and `vocab_size` the target's."""

    target_hidden_size: int
    draft_vocab_size: int
    """Tokens that it can say."""

    taps: tuple[int, ...]
    """Layers of the target whose inputs it reads; the number of layers means the last one's output."""

    norm_before_residual: bool = False
    """Whether the attention's output is added to the normed hidden state, and not to the state itself."""

    own_embedding: bool = False
    """Whether it has an embedding of its own, and not the target's."""


class Eagle3Head(RecurrentHead):
    """One decoder block whose attention reads a token's embedding beside the state before it.

    `d2t` `[V_draft]` int64: the draft's token i is the target's token `i + d2t[i]`.
    """

    method = "eagle3"
    config: Eagle3Config
    d2t: Tensor

    def __init__(self, config: Eagle3Config, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, config.taps
        self.embedding = (
            Embedding(normal(c.vocab_size, c.hidden_size, std=0.02), 1.0) if config.own_embedding else None
        )
        self.fc: nn.Module = Dense.random(len(config.taps) * config.target_hidden_size, c.hidden_size)
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.block = Block(c, 0, kernels, 2 * c.hidden_size)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head: nn.Module = Dense.random(c.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rope = Rope(c.rope, c.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of what its linear layers give, and of its KV."""
        return self.block.dtype

    @property
    def token_ids(self) -> Tensor:
        """`[V_draft]` int64: the target's ids of the draft's tokens."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, taps: Sequence[Tensor], shared: Shared) -> Tensor:
        """The layers' inputs, as they are, put together and projected: `[N, H]` float32."""
        return cast(Tensor, self.fc(torch.cat(list(taps), dim=-1))).float()

    def embed(self, tokens: Tensor, shared: Shared) -> Tensor:
        """`[N] -> [N, H]` float32."""
        if self.embedding is None:
            return shared.embed(tokens)
        embedded: Tensor = self.embedding(tokens.clamp(max=len(self.embedding.weight) - 1))
        return embedded

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`; the output is the next row's feature, before the last norm."""
        normed = self.kernels.norm(features, self.hidden_norm, self.dtype)
        both = torch.cat([self.kernels.norm(embedded, self.embedding_norm, self.dtype), normed], dim=-1)
        residual = normed.float() if self.config.norm_before_residual else features
        out: Tensor = self.block(residual, self.rope(batch.positions), batch, kv, both)
        return out

    def logits(self, out: Tensor, shared: Shared) -> Tensor:
        """`[M, H] -> [M, V]` float32 in the target's vocabulary: minus infinity for what it cannot say."""
        normed = self.kernels.norm(out, self.norm, torch.float32)
        logits = cast(Tensor, self.head(normed)).float()
        full = logits.new_full((len(logits), shared.vocab_size), -torch.inf)
        return full.index_copy_(1, self.token_ids, logits)


class Eagle3(RecurrentDrafter):
    """EAGLE-3, with EAGLE-2's tree: the likeliest guesses of each level are explored further.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle3` beside the target's weights.
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
        shape = Confident.within("eagle3", target, depth, width, branch)
        served = load_head(Eagle3Head, model, target, dtype)
        super().__init__(target, served, shape)
