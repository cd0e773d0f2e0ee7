"""Hydra's modules (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.own_layout import own_format, values_of
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.medusa.medusa_head import ResBlock
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.linear import Dense


@dataclass(frozen=True)
class HydraConfig:
    """Configuration of Hydra's heads, which share the target's embedding and output head."""

    hidden_size: int
    target_layers: int
    """Number of the target's decoder blocks. The heads read the output of the last one."""

    num_heads: int
    num_layers: int = 1
    """Residual layers of each head, after its input layer."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        if self.num_heads < 1 or self.num_layers < 0:
            raise DrafterError(
                f"hydra with {self.num_heads} heads of {self.num_layers} layers: "
                "it needs at least 1 head, of at least 0 layers"
            )


class HydraHead(Head):
    """Heads that read the feature of the token before the root, and the embeddings of later tokens.

    Head k, counted from 0, reads the embeddings of the root and of k draft tokens and guesses the next.
    """

    method = "hydra"

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        size, heads = config.hidden_size, range(config.num_heads)
        self.inputs = nn.ModuleList(_pass_on(size, k + 1) for k in heads)
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(size) for _ in range(config.num_layers)) for _ in heads
        )

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Run head k, where k + 1 is the number of embedded tokens.

        Args:
            features: `[N, H]` normed states of the target.
            embedded: `[N, k + 1, H]` embeddings of the root and of k draft tokens after it.

        Returns:
            `[N, H]` float32, inputs of the output head.
        """
        index = embedded.shape[1] - 1
        x = torch.cat([features, embedded.flatten(1)], dim=-1)
        x = cast(Tensor, self.inputs[index](x)).float()
        for layer in cast(Sequence[nn.Module], self.blocks[index]):
            x = layer(x)
        return x


def _pass_on(size: int, num_tokens: int) -> Dense:
    """An input layer that passes on the feature and ignores the tokens.

    Training starts from the target's own guess.
    """
    return Dense(torch.eye(size, (1 + num_tokens) * size), torch.zeros(size))


def open_hydra(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open Hydra heads that `soothsay train` has written."""
    config = HydraConfig(**values_of(HydraConfig, files))
    files.check_count(config.num_heads * (1 + config.num_layers), "modules")
    fit.check(hidden=config.hidden_size, vocab=int(files.config.get("vocab_size", fit.config.vocab_size)))
    fit.check_layers(config.target_layers)
    return StoredHead(files, fit, "Hydra (soothsay)", lambda: HydraHead(config), {})


FORMAT = own_format("hydra", open_hydra)
