"""EAGLE-3's module (Li et al. 2025, arXiv 2503.01840): features of several layers, an own output head.

EAGLE-3.1 is EAGLE-3 with a norm of each layer's feature (`norm_taps="each"`) and a normed output
(`norm_output`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.drafters.heads.trained_head import RecurrentHead, TargetEnds
from soothsay.drafters.ops.draft_ops import DraftOps, RecurrentDrafts, RecurrentLayers
from soothsay.model.blocks import Block
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, normal
from soothsay.model.norm import RMSNorm
from soothsay.model.rope import Rope
from soothsay.model.specs.model_spec import ModelSpec

TapNorms = Literal["none", "each", "whole"]
"""What is normed before `fc`: nothing, the feature of each layer, or all of them as one vector."""


@dataclass(frozen=True)
class Eagle3Config:
    """Configuration of EAGLE-3's head."""

    block: ModelSpec
    """The decoder block's. `num_layers` is 1, `vocab_size` is the target's."""

    target_hidden_size: int
    draft_vocab_size: int
    """Number of tokens that the head can draft."""

    taps: tuple[int, ...]
    """Layers of the target whose input the head reads. The number of layers means the last output."""

    norm_before_residual: bool = False
    """Whether the attention's output is added to the normed hidden state instead of the hidden state."""

    own_embedding: bool = False
    """Whether the head has its own embedding instead of the target's."""

    norm_taps: TapNorms = "none"
    norm_output: bool = False
    """Whether the next row reads the output after the last norm instead of before it."""


class Eagle3Head(RecurrentHead):
    """One decoder block whose attention reads a token's embedding together with the state before the token.

    `d2t` `[V_draft]` int64: token i of the draft vocabulary is token `i + d2t[i]` of the target's.
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
        width = len(config.taps) * config.target_hidden_size
        self.fc: nn.Module = Dense.random(width, c.hidden_size)
        each = config.taps if config.norm_taps == "each" else ()
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, c.norm.eps) for _ in each)
        self.input_norm = RMSNorm(width, c.norm.eps) if config.norm_taps == "whole" else None
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.block = Block(c.layers[0], c.hidden_size, kernels, in_features=2 * c.hidden_size)
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.head: nn.Module = Dense.random(c.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rope = Rope(c.rotations[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear layers' outputs, and of the KV."""
        return self.block.dtype

    @property
    def token_ids(self) -> Tensor:
        """`[V_draft]` int64: the target's ids of the draft vocabulary's tokens."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def draft_vocabulary(self) -> int | None:
        """See `Head`."""
        return self.config.draft_vocab_size

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """Concatenate the layers' inputs, normed if the configuration says so, and project them.

        Returns:
            `[N, H]` float32.
        """
        if self.fc_norm:
            taps = [self._norm(tap, cast(RMSNorm, n)) for tap, n in zip(taps, self.fc_norm, strict=True)]
        read = torch.cat(list(taps), dim=-1)
        if self.input_norm is not None:
            read = self._norm(read, self.input_norm)
        return cast(Tensor, self.fc(read)).float()

    def embed(self, tokens: Tensor, shared: TargetEnds) -> Tensor:
        """Embed tokens, `[N] -> [N, H]` float32."""
        if self.embedding is None:
            return shared.embed(tokens)
        embedded: Tensor = self.embedding(tokens.clamp(max=len(self.embedding.weight) - 1))
        return embedded

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`. The output is the next row's feature, before the last norm or after it."""
        normed = self.kernels.norm(features, self.hidden_norm, self.dtype)
        both = torch.cat([self.kernels.norm(embedded, self.embedding_norm, self.dtype), normed], dim=-1)
        residual = normed.float() if self.config.norm_before_residual else features
        out: Tensor = self.block(residual, self.rope(batch.positions), batch, kv, both)
        return self._norm(out, self.norm) if self.config.norm_output else out

    def logits(self, out: Tensor, shared: TargetEnds) -> Tensor:
        """`[M, H] -> [M, V]` float32 in the target's vocabulary; minus infinity outside of `d2t`."""
        normed = out if self.config.norm_output else self._norm(out, self.norm)
        logits = cast(Tensor, self.head(normed)).float()
        full = logits.new_full((len(logits), shared.vocab_size), -torch.inf)
        return full.index_copy_(1, self.token_ids, logits)

    def drafts_at_once(self, shared: TargetEnds, ops: DraftOps) -> RecurrentDrafts | None:
        """See `RecurrentHead`."""
        norms: list[Tensor] = [cast(RMSNorm, norm).weight for norm in self.fc_norm]
        if self.input_norm is not None:
            norms = [self.input_norm.weight]
        return ops.recurrent_drafts(
            RecurrentLayers(
                block=self.block,
                head=self.head,
                fuse=self.fc,
                taps=len(norms) or 1,
                tap_norms=torch.cat(norms).detach() if norms else None,
                embedding=shared.embedding if self.embedding is None else self.embedding,
                rope=self.rope,
                embedding_norm=self.embedding_norm,
                feature_norm=self.hidden_norm,
                norm=self.norm,
                ids=self.token_ids,
                norms_residual=self.config.norm_before_residual,
                norms_output=self.config.norm_output,
            )
        )

    def _norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.kernels.norm(x.float().contiguous(), norm, torch.float32)
