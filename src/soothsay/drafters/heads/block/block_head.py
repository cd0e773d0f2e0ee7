"""The module that guesses a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.drafters.heads.checkpoints.block_configs import block_config
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.own_layout import check_shortlist, own_format, required, values_of
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.refiner import UNITS, Refiner
from soothsay.drafters.heads.trained_head import ShortlistHead, TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.blocks import Block, Blocks
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, normal
from soothsay.model.norm import RMSNorm
from soothsay.model.rope import Rope
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

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear layers' outputs, and of the KV."""
        return self.blocks.dtype

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
            self.kernels.norm(embedded, self.embedding_norm, self.dtype),
            self.kernels.norm(features, self.feature_norm, self.dtype),
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
    return StoredHead(files, fit, "block (soothsay)", lambda: BlockHead(config, fit.kernels_for(block)), {})


FORMAT = own_format("block", open_block)
