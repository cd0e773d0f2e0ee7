"""Medusa (Cai et al. 2024, arXiv 2401.10774): small heads on one hidden state, each guessing a token further
ahead than the last, none of them knowing what the others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.drafters.base import Drafter, Observation, Target
from soothsay.drafters.context import FeatureContext
from soothsay.drafters.head import Head, Shared, load_head
from soothsay.drafters.template import Layout
from soothsay.engine.cache import KVPool
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError
from soothsay.model.linear import Dense


@dataclass(frozen=True)
class MedusaConfig:
    """What the heads compute."""

    hidden_size: int
    vocab_size: int
    target_layers: int
    """Decoder blocks of the target; its last output is what the heads read."""

    num_heads: int
    num_layers: int = 1
    """Residual layers of each head."""

    own_heads: bool = False
    """Whether each head has an output matrix of its own, and not the target's."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for numbers that make no heads."""
        if min(self.num_heads, self.num_layers) < 1:
            raise DrafterError(
                f"medusa with {self.num_heads} heads of {self.num_layers} layers: each must be at least 1"
            )


class ResBlock(nn.Module):
    """`x + silu(linear(x))`. A new one is the identity, so that training starts from the target's guess."""

    def __init__(self, size: int):
        super().__init__()
        self.linear: nn.Module = Dense(torch.zeros(size, size), torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, H] -> [N, H]` float32."""
        return x + F.silu(cast(Tensor, self.linear(x)).float())


class MedusaHead(Head):
    """Head k (0 is the first) at the feature of the token before the root guesses the k + 1st token behind
    the root.
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

    def logits(self, hidden: Tensor, index: int, shared: Shared) -> Tensor:
        """Head `index`'s share of `forward`, `[M, H]` -> `[M, V]` float32."""
        if not self.config.own_heads:
            return shared.logits(hidden)
        return cast(Tensor, self.lm_heads[index](hidden)).float()

    def guesses(self, features: Tensor, shared: Shared) -> Tensor:
        """All heads' logits, `[N, H]` -> `[N, heads, V]` float32; a shared output head is read once."""
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


class Medusa(Drafter):
    """Medusa's heads guess, and the tree is made of their likeliest tokens.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `MedusaHead`; "" is `drafters/medusa` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens of each head that may stand in the tree.
        tree: "best-first" trusts the heads' confidence at each step, "static" is one tree for all steps, and
            "measured" fits that one to what has been accepted so far.
        dtype: of the heads' linear layers; "auto" is the target's.
    """

    trained = True

    def __init__(
        self,
        target: Target,
        model: str | Path | MedusaHead = "",
        nodes: int = 63,
        branch: int = 10,
        tree: str = "best-first",
        dtype: DType = "auto",
    ):
        self.served = load_head(MedusaHead, model, target, dtype)
        self.head, self.shared, self.taps = self.served.head, self.served.shared, self.served.taps
        self.layout = Layout(tree, self.head.config.num_heads, branch, nodes)
        self.max_nodes = 1 + nodes
        self.context = FeatureContext(target, no_keys(target))

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A tree for each request whose feature is known, the root alone for the others."""
        trees = {request: DraftTree(int(request.tokens[-1])) for request in requests}
        ready = {r: tree for r, tree in trees.items() if r.max_nodes > 1 and self.context.ready(r)}
        features = {
            request: read[-1]
            for batch in self.context.catch_up(ready)
            for request, read in zip(batch.requests, batch.features, strict=True)
        }
        if features:
            logits = self.head.guesses(torch.stack([*features.values()]), self.shared)  # [R, heads, V]
            depths = [self.head.config.num_heads] * len(features)
            grown = self.layout.trees([*features], logits.flatten(0, 1), depths)
            trees.update(zip(features, grown, strict=True))
        return [*trees.values()]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next heads read, and count which guesses were right."""
        for _ in self.context.observe(observations, self.served.fuse):
            pass  # no keys to compute; but features do not pile up where nothing is drafted
        self.layout.observe(observations)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.context.release(request)
        self.layout.release(request)


def no_keys(target: Target) -> KVPool:
    """A pool for a drafter that attends to nothing; nobody writes to it."""
    size = target.num_blocks, target.config.block_size
    return KVPool((1, 1, 1), *size, torch.uint8, target.model.device)
