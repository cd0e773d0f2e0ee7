"""Gemma 4's assistants: small decoders whose layers attend to the target's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.batch import Batch
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.blocks import Block, Blocks
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, normal
from soothsay.model.norm import RMSNorm
from soothsay.model.rope import Rope


@dataclass(frozen=True)
class AssistantConfig:
    """Configuration of an assistant."""

    block: ModelConfig
    """The decoder blocks'. None of them has keys and values of its own."""

    target_hidden_size: int
    target_layers: int

    clusters: int = 0
    """Number of clusters of equal size into which the vocabulary is divided; 0: it is not divided."""

    clusters_read: int = 0
    """Number of clusters whose tokens can be guessed at a row."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        tokens, clusters = self.block.vocab_size, self.clusters
        if clusters and (tokens % clusters or not 1 <= self.clusters_read <= clusters):
            raise DrafterError(
                f"assistant with {clusters} clusters (num_centroids) that divide {tokens} tokens, of which "
                f"{self.clusters_read} are read (centroid_intermediate_top_k): that is not possible"
            )


class ClusteredHead(nn.Module):
    """An output head that reads the tokens of a row's best clusters only."""

    def __init__(self, config: AssistantConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.kernels, self.count = kernels, config.clusters_read
        self.centroids: nn.Module = Dense.random(c.hidden_size, config.clusters)
        self.table = Embedding(normal(c.vocab_size, c.hidden_size, std=0.02), 1.0)
        # [V] int64: the tokens of the first cluster, of the second, ...
        self.register_buffer("token_ordering", torch.arange(c.vocab_size))
        self.token_ordering: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """`[M, H] -> [M, V]` float32; minus infinity for tokens in other clusters."""
        scores: Tensor = self.centroids(hidden)
        best = self.kernels.largest(scores.float(), self.count)[1]  # [M, count]
        tokens = self.token_ordering.view(scores.shape[1], -1)[best].flatten(1)  # [M, n]
        rows = cast(Tensor, self.table(tokens.flatten())).view(*tokens.shape, -1)
        logits = torch.bmm(rows, hidden.float()[:, :, None])[:, :, 0]
        full = logits.new_full((len(hidden), len(self.token_ordering)), -torch.inf)
        return full.scatter_(1, tokens, logits)


class AssistantHead(Head):
    """Continues from the target's last normed output, or from its own output, token by token.

    A row reads a token and the output of the row before. All rows of a draft stand at the position of the
    last committed token, and attend to the target's keys and values of the tokens before it.
    """

    method = "assistant"

    def __init__(self, config: AssistantConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, (config.target_layers,)
        self.pre_projection: nn.Module = Dense.random(2 * config.target_hidden_size, c.hidden_size)
        self.blocks = Blocks(Block(c, layer, kernels) for layer in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.post_projection: nn.Module = Dense.random(c.hidden_size, config.target_hidden_size)
        self.head: nn.Module = (
            ClusteredHead(config, kernels) if config.clusters else Dense.random(c.hidden_size, c.vocab_size)
        )
        self.rope = Rope(c.rope, c.head_dim if c.global_heads is None else c.global_heads.size)
        self.second_rope = None if c.second_rope is None else Rope(c.second_rope, c.head_dim)

    def forward(
        self, embedded: Tensor, states: Tensor, batch: Batch, kv: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run one pass.

        Args:
            embedded: `[N, H_target]` float32, the target's embedding of each row's token.
            states: `[N, H_target]` float32, the target's last normed output or the output of the row before.
            batch: the rows' places.
            kv: keys and values of the target, `[2 * H_kv, S, d]` for each block.

        Returns:
            `[N, H_target]` outputs that the next rows read, and `[N, V]` logits; float32.
        """
        x = cast(Tensor, self.pre_projection(torch.cat([embedded, states], dim=-1))).float()
        rope, last = self.rope(batch.positions), len(self.blocks)
        ropes = rope, rope if self.second_rope is None else self.second_rope(batch.positions)
        x = self.blocks(x, ropes, batch, kv, range(last))[last]
        hidden = self.kernels.norm(x, self.norm, torch.float32)
        return self.post_projection(hidden).float(), self.head(hidden).float()
