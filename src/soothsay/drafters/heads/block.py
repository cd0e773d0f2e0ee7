"""Drafts several tokens in one pass (P-EAGLE 2026, arXiv 2602.01469; DFlash 2026, arXiv 2602.06036).

The rows of committed tokens are EAGLE's: a token, and the target's feature of the token before. After the
root come rows of learned vectors, one for each further depth. One pass over all rows predicts all depths.
These predictions do not depend on each other. A small product of each token with the next can correct that,
or a recurrent cell along each path (ReDrafter, Cheng et al. 2024, arXiv 2403.09919).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.batch import Batch
from soothsay.core.request import Request
from soothsay.core.transfer import send
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.checkpoints.block_configs import block_config
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.head_directory import (
    check_shortlist,
    own_format,
    required,
    values_of,
)
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.feature_drafter import draft_ready, load_head
from soothsay.drafters.heads.one_pass_drafter import MaskRowsDrafter, PathRows
from soothsay.drafters.heads.refiner import UNITS, RefinedTrees, Refiner
from soothsay.drafters.heads.trained_head import ShortlistHead, TargetEnds
from soothsay.drafters.ops.draft_ops import HeadOutputs
from soothsay.errors import DrafterError
from soothsay.model.decoder.blocks import Block, Blocks
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.specs.model_spec import ModelSpec


@dataclass(frozen=True)
class BlockConfig:
    """Configuration of a one-pass head, which shares the target's embedding and output head."""

    block: ModelSpec
    """The decoder blocks'. `num_layers` is their number, `hidden_size` must be that of the features."""

    target_hidden_size: int
    taps: tuple[int, ...]
    """Layers of the target. Their inputs, concatenated and projected, are the feature."""

    size: int
    """Number of guesses in one pass."""

    markov_rank: int = 0
    """Rank of the product that corrects a guess by the token before it; 0: no correction."""

    cell_size: int = 0
    """Units of the recurrent cell that corrects a guess by the tokens of its path; 0: no cell."""

    scaled_taps: bool = False
    """Whether the features' numbers are brought to equal sizes."""

    shortlist_size: int = 0
    """Number of tokens that can be guessed; 0: all."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        vocabulary = self.block.vocab_size
        if not 0 <= self.shortlist_size <= vocabulary:
            raise DrafterError(
                f"block with shortlist_size={self.shortlist_size}: it must be from 0 to {vocabulary} tokens"
            )
        if self.size < 1 or self.block.num_layers < 1 or not self.taps or self.markov_rank < 0:
            raise DrafterError(
                f"block with size={self.size}, {self.block.num_layers} layers, taps={self.taps}, "
                f"markov_rank={self.markov_rank}: it needs at least one guess, layer and tap, no rank below 0"
            )
        if self.cell_size < 0 or self.cell_size % UNITS or (self.cell_size and self.markov_rank):
            raise DrafterError(
                f"block with cell_size={self.cell_size}, markov_rank={self.markov_rank}: a cell has a "
                f"multiple of {UNITS} units, and takes the place of a rank"
            )


class BlockHead(ShortlistHead):
    """Decoder blocks over a root's row and learned rows after it, all in one pass.

    The root's row makes guess 1, the k-th learned row makes guess k + 1. A product of low rank or a
    `Refiner` then makes a guess depend on the tokens of its path.

    `tap_scale` `[taps * H]` brings the features' numbers to equal sizes. In real models, a few of them are
    hundreds of times larger than the others.
    """

    method = "block"

    def __init__(self, config: BlockConfig, kernels: Kernels):
        super().__init__(config.shortlist_size)
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, config.taps
        width = len(config.taps) * config.target_hidden_size
        self.tap_scale = nn.Parameter(torch.ones(width), requires_grad=False) if config.scaled_taps else None
        self.fc: nn.Module = Dense.random(width, c.hidden_size)
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.feature_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.projection: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size)
        self.blocks = Blocks(Block(layer, c.hidden_size, kernels) for layer in c.layers)
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.rope = Rope(c.rotations[0])
        self.queries = nn.Parameter(normal(config.size - 1, 2, c.hidden_size, std=1.0))
        self.markov_in: Embedding | None = None
        self.markov_out: nn.Module | None = None
        if config.markov_rank:
            tokens = config.shortlist_size or c.vocab_size
            self.markov_in = Embedding(normal(tokens, config.markov_rank, std=0.02), 1.0)
            self.markov_out = Dense(torch.zeros(tokens, config.markov_rank))
        self.refiner = Refiner(c.hidden_size, config.cell_size) if config.cell_size else None

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """Concatenate features, scale them, and project them: `[N, H]` each -> `[N, H]` float32."""
        whole = torch.cat(list(taps), dim=-1)
        return cast(Tensor, self.fc(whole if self.tap_scale is None else whole * self.tap_scale)).float()

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Run one pass.

        Args:
            embedded: `[N, H]`, the embedding of each row's token; `queries[k - 1, 0]` for the k-th row
                after a root.
            features: `[N, H]`, the fused feature of the token before; `queries[k - 1, 1]` for the k-th row
                after a root.
            batch: the rows' places.
            kv: keys and values of each block, `[2 * H_kv, S, d]`; None: they exist during the pass only.

        Returns:
            `[N, H]` normed, float32.
        """
        normed = [
            self.kernels.norm(embedded, self.embedding_norm, self.blocks.dtype),
            self.kernels.norm(features, self.feature_norm, self.blocks.dtype),
        ]
        x = cast(Tensor, self.projection(torch.cat(normed, dim=-1))).float()
        rope = self.rope(batch.positions)
        last = len(self.blocks)
        x = self.blocks(x, (rope, rope), batch, kv, range(last))[last]
        return self.kernels.norm(x, self.norm, torch.float32)

    def correct(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Correct logits, as `logits` returns them, by the tokens `[M]` before the guesses.

        Tokens outside of the shortlist correct nothing.
        """
        if self.markov_in is None or self.markov_out is None:
            return logits
        correction: Tensor = self.markov_out(self.before(tokens))
        return logits + correction.float()

    def before(self, tokens: Tensor) -> Tensor:
        """What the correction knows of the tokens before: `[M] -> [M, rank]`."""
        assert self.markov_in is not None
        if self.shortlist is None:
            return cast(Tensor, self.markov_in(tokens))
        places = torch.searchsorted(self.shortlist, tokens).clamp(max=len(self.shortlist) - 1)
        known = self.shortlist[places] == tokens
        return cast(Tensor, self.markov_in(places)) * known[:, None]


def open_block(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open a one-pass head that `soothsay train` has written."""
    raw = {"num_hidden_layers": 0, **required(files, "block")}
    block = block_config(files, raw, {}, "blocks.0.", int(raw["num_hidden_layers"]))
    files.check_count(block.num_layers, "modules")
    config = BlockConfig(**{**values_of(BlockConfig, files), "block": block})
    fit.check(hidden=config.target_hidden_size, vocab=block.vocab_size)
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_taps(config.taps)
    fit.check_context(block.max_positions)
    if config.shortlist_size:
        check_shortlist(files, config.shortlist_size, block.vocab_size)
    return StoredHead(fit, "block (soothsay)", lambda: BlockHead(config, fit.kernels_for(block)), {})


FORMAT = own_format(open_block)


class BlockDrafter(MaskRowsDrafter[BlockHead]):
    """Predicts all depths in one pass, and makes trees of the likeliest tokens.

    Without a product of each token with the next, the tree is the best one by the probabilities of the
    depths. With it, the tree grows level by level: the product corrects the logits of a depth by the token
    above. With a cell, it grows node by node: the cell refines the likeliest tokens of a depth below each
    node.

    Args:
        target: the model to draft for.
        model: a directory with the drafter, or a `BlockHead`; "" is `drafters/block` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, where the tree grows level by level; None: an eighth of
            the largest tree, and at least 4.
        dtype: element type of the drafter's linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | BlockHead = "",
        nodes: int = 63,
        branch: int = 8,
        width: int | None = None,
        dtype: DType = "auto",
    ):
        width = max(target.config.max_tree // 8, 4) if width is None else width
        check_at_least_one("block", nodes=nodes, branch=branch, width=width)
        served = load_head(BlockHead, model, target, dtype)
        config, cell = served.head.config, served.head.refiner
        shape = config.size, nodes, branch, width if config.markov_rank else None
        super().__init__(target, served, config.block, *shape)
        self.refined: RefinedTrees | None = None
        if cell is not None:
            self.refined = RefinedTrees(self.head, cell, self.shared, target.ops, self.max_nodes)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose features are known, and the root alone for the others."""
        if self.refined is None:
            return super().propose(requests)
        return draft_ready(requests, self.ready, partial(self._refine, self.refined))

    def _refine(self, refined: RefinedTrees, ready: Sequence[Request]) -> list[DraftTree]:
        """Trees whose guesses the cell refines. Those of one call have the same number of depths."""
        outputs = self.guessing(ready)
        trees: dict[Request, DraftTree] = {}
        for depth in {len(rows) for rows in outputs}:
            some = {r: rows for r, rows in zip(ready, outputs, strict=True) if len(rows) == depth}
            roots = send([int(r.tokens[-1]) for r in some], outputs[0].device)
            embedded = self.head.embedded(roots, self.shared)
            rows, read, states = refined.cell.begin(torch.stack([*some.values()]), embedded)
            head_outputs = HeadOutputs(self.head.logits(rows, self.shared), read, states)
            trees.update(zip(some, refined.trees([*some], head_outputs), strict=True))
        return [trees[request] for request in ready]

    def learned_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """See `MaskRowsDrafter`."""
        return self.head.queries[:count, 0], self.head.queries[:count, 1]

    def correct(self, rows: PathRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `OnePassDrafter`."""
        return self.head.correct(rows.logits, tokens), rows.states
