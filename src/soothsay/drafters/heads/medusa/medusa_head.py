"""Medusa's modules (Cai et al. 2024, arXiv 2401.10774): small heads on one hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.linear import Dense


@dataclass(frozen=True)
class MedusaConfig:
    """Configuration of Medusa's heads."""

    hidden_size: int
    vocab_size: int
    target_layers: int
    """Number of the target's decoder blocks. The heads read the output of the last one."""

    num_heads: int
    num_layers: int = 1
    """Residual layers of each head."""

    own_heads: bool = False
    """Whether each head has its own output head instead of the target's."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        if min(self.num_heads, self.num_layers) < 1:
            raise DrafterError(
                f"medusa with {self.num_heads} heads of {self.num_layers} layers: each must be at least 1"
            )


class ResBlock(nn.Module):
    """`x + silu(linear(x))`. A new one is the identity: training starts from the target's own guess."""

    def __init__(self, size: int):
        super().__init__()
        self.linear: nn.Module = Dense(torch.zeros(size, size), torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, H] -> [N, H]` float32."""
        return x + F.silu(cast(Tensor, self.linear(x)).float())


class MedusaHead(Head):
    """Heads that read the feature of the token before the root.

    Head k, counted from 0, guesses the token k + 1 places after the root.
    """

    method = "medusa"

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            Dense.random(config.hidden_size, config.vocab_size)
            for _ in range(config.num_heads if config.own_heads else 0)
        )

    def forward(self, features: Tensor) -> Tensor:
        """`[N, H]` normed states of the target -> `[heads, N, H]` float32."""
        return torch.stack([self._run(layers, features) for layers in self.blocks])

    def logits(self, hidden: Tensor, index: int, shared: TargetEnds) -> Tensor:
        """Outputs of head `index`, `[M, H]` -> its logits `[M, V]` float32."""
        if not self.config.own_heads:
            return shared.logits(hidden)
        return cast(Tensor, self.lm_heads[index](hidden)).float()

    def guesses(self, features: Tensor, shared: TargetEnds) -> Tensor:
        """Features `[N, H]` -> logits `[N, heads, V]` float32 of all heads. A shared head runs once."""
        hidden = self(features)
        if self.config.own_heads:
            each = [self.logits(rows, index, shared) for index, rows in enumerate(hidden)]
            return torch.stack(each, dim=1)
        logits = shared.logits(hidden.transpose(0, 1).flatten(0, 1))
        return logits.view(len(features), self.config.num_heads, -1)

    @staticmethod
    def _run(layers: nn.Module, x: Tensor) -> Tensor:
        for layer in cast(Sequence[nn.Module], layers):
            x = layer(x)
        return x
