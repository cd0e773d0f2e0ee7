"""Drafts by one look at the target's features and a recurrent cell.

The cell is that of ReDrafter (Cheng et al. 2024, arXiv 2403.09919).
A gated layer reads the features of the token before the root, and the root's token. It predicts all depths at
once. The cell refines these guesses along each path, so a tree costs little more than its root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.transfer import send
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.head_directory import check_shortlist, own_format, values_of
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter, draft_ready, load_head
from soothsay.drafters.heads.refiner import UNITS, RefinedTrees, Refiner
from soothsay.drafters.heads.trained_head import ShortlistHead, TargetEnds
from soothsay.drafters.ops.draft_ops import DraftOps, HeadOutputs, RedrafterCall
from soothsay.errors import DrafterError
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.ops.linear import Dense


@dataclass(frozen=True)
class RedrafterConfig:
    """Configuration of a head that shares the target's embedding and output head."""

    target_hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    """Layers of the target. Their inputs are what the head looks at."""

    size: int
    """Number of guesses in a row."""

    hidden_size: int
    """Units between the features and the guesses."""

    cell_size: int
    """Units of the recurrent cell."""

    shortlist_size: int = 0
    """Number of tokens that can be guessed; 0: all."""

    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        sizes = (self.target_hidden_size, self.hidden_size, self.cell_size)
        if min(sizes) < UNITS or any(size % UNITS for size in sizes):
            raise DrafterError(f"redrafter with layers of {sizes} units: each must be a multiple of {UNITS}")
        if self.size < 1 or not self.taps or not 0 <= self.shortlist_size <= self.vocab_size:
            raise DrafterError(
                f"redrafter with size={self.size}, taps={self.taps}, {self.shortlist_size} of "
                f"{self.vocab_size} tokens: it needs at least one guess and tap"
            )


class RedrafterHead(ShortlistHead):
    """A gated layer that looks at the target's features and the root's token, once for all guesses.

    `look` gives the layer's gates and values, and what is passed on to all guesses. Each guess has an output
    of its own. A `Refiner` then makes it depend on the tokens of its path. There is no attention: a feature
    of the target has seen the whole context.

    `tap_scale` `[taps * H]` brings the features' numbers to equal sizes. In real models, a few of them are
    hundreds of times larger than the others.
    """

    method = "redrafter"

    def __init__(self, config: RedrafterConfig):
        super().__init__(config.shortlist_size)
        self.config, self.taps = config, config.taps
        h, seen = config.target_hidden_size, (len(config.taps) + 1) * config.target_hidden_size
        self.tap_scale = nn.Parameter(torch.ones(seen - h), requires_grad=False)
        self.embedding_norm = RMSNorm(h, config.norm_eps)
        self.look: nn.Module = Dense.random(seen, 2 * config.hidden_size + h)
        self.guesses: nn.Module = Dense.random(config.hidden_size, config.size * h)
        self.norm = RMSNorm(h, config.norm_eps)
        self.refiner = Refiner(h, config.cell_size)

    @property
    def parts(self) -> tuple[int, int, int]:
        """What `look` gives: numbers of gates, of values, and of what is passed on."""
        return self.config.hidden_size, self.config.hidden_size, self.config.target_hidden_size

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """The features, scaled: `[N, H]` for each tap -> `[N, taps * H]` float32."""
        return torch.cat(list(taps), dim=-1) * self.tap_scale

    def seen(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """What all guesses read.

        Args:
            features: `[N, taps * H]`, of the token before the root.
            embedded: `[N, H]`, of the root's token.

        Returns:
            `[N, hidden]` and `[N, H]`, both float32.
        """
        both = torch.cat([features, embedded], dim=-1)
        gate, up, passed = self.look(both).float().split(self.parts, dim=-1)
        return F.silu(gate) * up, passed

    def forward(self, features: Tensor, embedded: Tensor, shared: TargetEnds) -> Tensor:
        """The outputs of all guesses before they are refined: `[N, size, H]` normed, float32.

        Arguments are those of `seen`.
        """
        inner, passed = self.seen(features, embedded)
        outputs = self.guesses(inner).float().view(len(inner), self.config.size, -1) + passed[:, None]
        return shared.kernels.norm(outputs.flatten(0, 1), self.norm, torch.float32).view(outputs.shape)

    def outputs(self, features: Tensor, embedded: Tensor, shared: TargetEnds) -> HeadOutputs:
        """All that a tree needs. Arguments are those of `seen`."""
        rows, read, states = self.refiner.begin(self(features, embedded, shared), embedded)
        return HeadOutputs(self.logits(rows, shared), read, states)

    def outputs_at_once(self, ops: DraftOps) -> RedrafterCall | None:
        """`outputs` in one call, of a head that is ready to draft, but with products of the output head.

        None: there is none, or the head guesses with the target's own output head.
        """
        if self.head is None:
            return None
        cell = self.refiner
        layers = self.look, self.guesses, cell.read, cell.token, cell.out, self.head
        return ops.redrafter_head(layers, self.norm, self.config.size)


def open_redrafter(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open a recurrent head that `soothsay train` has written."""
    config = RedrafterConfig(**values_of(RedrafterConfig, files))
    fit.check(hidden=config.target_hidden_size, vocab=config.vocab_size)
    fit.check_taps(config.taps)
    if config.shortlist_size:
        check_shortlist(files, config.shortlist_size, config.vocab_size)
    return StoredHead(fit, "redrafter (soothsay)", lambda: RedrafterHead(config), {})


FORMAT = own_format(open_redrafter)


class Redrafter(LastFeatureDrafter[RedrafterHead]):
    """Looks once, and grows the best tree of the guesses as the cell refines them.

    Args:
        target: the model to draft for.
        model: a directory with the head, or a `RedrafterHead`; "" is `drafters/redrafter` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        dtype: element type of the head's linear layers; "auto" is the target's.
    """

    def __init__(
        self, target: Target, model: str | Path | RedrafterHead = "", nodes: int = 63, dtype: DType = "auto"
    ):
        check_at_least_one("redrafter", nodes=nodes)
        super().__init__(target, load_head(RedrafterHead, model, target, dtype))
        self.max_nodes = 1 + nodes
        self.refined = RefinedTrees(self.head, self.head.refiner, self.shared, target.ops, self.max_nodes)
        self._at_once = self.head.outputs_at_once(target.ops)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose feature is known, and the root alone for the others."""
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        roots = send([int(r.tokens[-1]) for r in ready], self.target.model.device)
        embedded = self.head.embedded(roots, self.shared)
        return self.refined.trees(ready, self._outputs(self.features(ready), embedded))

    def _outputs(self, features: Tensor, embedded: Tensor) -> HeadOutputs:
        if self._at_once is None:
            return self.head.outputs(features, embedded, self.shared)
        outputs = self._at_once(features, embedded)
        return outputs._replace(logits=self.shared.finished(outputs.logits))
