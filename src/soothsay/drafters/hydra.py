"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each told what the ones before it guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.drafters.base import Observation, Target
from soothsay.drafters.context import FeatureContext, Pass, State
from soothsay.drafters.grown import Confident, GrownDrafter
from soothsay.drafters.head import Head, Shared, load_head
from soothsay.drafters.medusa import ResBlock, no_keys
from soothsay.engine.request import Request
from soothsay.errors import DrafterError
from soothsay.model.linear import Dense


@dataclass(frozen=True)
class HydraConfig:
    """What the heads compute. They share embedding and output head with the target."""

    hidden_size: int
    target_layers: int
    """Decoder blocks of the target; its last output is what the heads read."""

    num_heads: int
    num_layers: int = 1
    """Residual layers of each head, behind its input layer."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for numbers that make no heads."""
        if self.num_heads < 1 or self.num_layers < 0:
            raise DrafterError(
                f"hydra with {self.num_heads} heads of {self.num_layers} layers: "
                "it needs at least 1 head, of at least 0 layers"
            )


class HydraHead(Head):
    """Head k (0 is the first) reads the feature of the token before the root, the root and k guesses behind
    it, and guesses the next.
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
        """The head for as many tokens as are given.

        Args:
            features: `[N, H]` normed states of the target.
            embedded: `[N, k + 1, H]` the root's embedding and those of k guesses behind it.

        Returns:
            `[N, H]` float32 of head k, for the output head.
        """
        index = embedded.shape[1] - 1
        x = torch.cat([features, embedded.flatten(1)], dim=-1)
        x = cast(Tensor, self.inputs[index](x)).float()
        for layer in cast(Sequence[nn.Module], self.blocks[index]):
            x = layer(x)
        return x

    def logits(self, hidden: Tensor, shared: Shared) -> Tensor:
        """`[M, H]` -> `[M, V]` float32."""
        return shared.logits(hidden)


def _pass_on(size: int, num_tokens: int) -> Dense:
    """An input layer that gives the feature and nothing of the tokens: training starts from the target's
    guess.
    """
    return Dense(torch.eye(size, (1 + num_tokens) * size), torch.zeros(size))


class Hydra(GrownDrafter[FeatureContext]):
    """Hydra's heads guess one after the other, each below what the last ones found likeliest.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `HydraHead`; "" is `drafters/hydra` beside the target.
        width: nodes of each level that are explored further; None: as many as the largest tree has room for.
        branch: likeliest tokens proposed below each of them; None: one more than `width`.
        dtype: of the heads' linear layers; "auto" is the target's.
    """

    trained = True

    def __init__(
        self,
        target: Target,
        model: str | Path | HydraHead = "",
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        self.served = load_head(HydraHead, model, target, dtype)
        self.head, self.shared, self.taps = self.served.head, self.served.shared, self.served.taps
        shape = Confident.within("hydra", target, self.head.config.num_heads, width, branch)
        super().__init__(target, FeatureContext(target, no_keys(target)), shape)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next heads read."""
        for _ in self.context.observe(observations, self.served.fuse):
            pass  # no keys to compute; but features do not pile up where nothing is drafted

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.context.release(request)

    def _open(self, request: Request) -> State | None:
        return self.context.states[request] if self.context.ready(request) else None

    def _outputs(self, batch: Pass) -> Tensor:
        """What a head reads below each node: `[M, (k + 2) * H]`, the feature and k + 1 embeddings."""
        tokens: list[int] = []
        read = [batch.features[0][:0]]
        for rows, above in zip(batch.rows, batch.features, strict=True):
            if rows.tree is not None:
                own = [*rows.tokens[-1:].tolist(), *rows.tree.tokens[rows.first :]]
                tokens += own
                read.append(above[-len(own) :])
        embedded = self.shared.embed(torch.tensor(tokens, dtype=torch.int64, device=self.target.model.device))
        return torch.cat([torch.cat(read), embedded], dim=-1)

    def _logits(self, outputs: Tensor) -> Tensor:
        parts = outputs.view(len(outputs), -1, self.head.config.hidden_size)
        return self.head.logits(self.head(parts[:, 0], parts[:, 1:]), self.shared)
