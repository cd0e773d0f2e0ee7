"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which reads the tokens above it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.transfer import send
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.head_directory import own_format, values_of
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.feature_drafter import StateGrownDrafter, load_head
from soothsay.drafters.heads.medusa import res_blocks
from soothsay.drafters.heads.trained_head import Head
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree
from soothsay.errors import DrafterError
from soothsay.model.ops.linear import Dense


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
        # they pass on the feature and ignore the tokens: training starts from the target's own guess
        self.inputs = nn.ModuleList(Dense(torch.eye(size, (2 + k) * size), torch.zeros(size)) for k in heads)
        self.blocks = nn.ModuleList(res_blocks(size, config.num_layers) for _ in heads)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Run head k, where k + 1 is the number of embedded tokens.

        Args:
            features: `[N, H]` normed states of the target.
            embedded: `[N, k + 1, H]` embeddings of the root and of k draft tokens after it.

        Returns:
            `[N, H]` float32, inputs of the output head.
        """
        index = embedded.shape[1] - 1
        x = self.inputs[index](torch.cat([features, embedded.flatten(1)], dim=-1)).float()
        return cast(Tensor, self.blocks[index](x))


def open_hydra(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open Hydra heads that `soothsay train` has written."""
    config = HydraConfig(**values_of(HydraConfig, files))
    files.check_count(config.num_heads * (1 + config.num_layers), "modules")
    fit.check(hidden=config.hidden_size, vocab=int(files.config.get("vocab_size", fit.config.vocab_size)))
    fit.check_layers(config.target_layers)
    return StoredHead(fit, "Hydra (soothsay)", lambda: HydraHead(config), {})


FORMAT = replace(own_format(open_hydra), reads_last=True)


class Hydra(StateGrownDrafter[HydraHead]):
    """Grows trees with Hydra's heads: head k reads the feature and the k tokens on the path to a node.

    A node's state is the vector that its head reads: `[(k + 1) * H]`, the feature of the token
    before the root and the embeddings of the path's tokens, the root included.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `HydraHead`; "" is `drafters/hydra` beside the target.
        width: nodes of each level that are expanded; None: as many as the largest tree has room for.
        branch: likeliest tokens that are added below each of them; None: one more than `width`.
        dtype: element type of the heads' linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | HydraHead = "",
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        served = load_head(HydraHead, model, target, dtype)
        shape = ConfidentShape.within("hydra", target, served.head.config.num_heads, width, branch)
        super().__init__(target, served, shape)

    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Append the frontiers' tokens to their parents' states, `[M, k * H]`, and run the next head."""
        tokens = [token for g in growing for token in g.frontier_tokens]
        embedded = self.shared.embed(send(tokens, above.device, torch.int64))
        read = torch.cat([above, embedded], dim=-1)
        parts = read.view(len(read), -1, self.head.config.hidden_size)
        return self.shared.logits(self.head(parts[:, 0], parts[:, 1:])), read
