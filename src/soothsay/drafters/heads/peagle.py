"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 that predicts all depths in one pass.

EAGLE-3's block, and more, run over mask rows after the root.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.batch import Batch
from soothsay.core.transfer import send
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.checkpoints.block_configs import check_block
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit, mask_token
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, StoredHead, block_names
from soothsay.drafters.heads.eagle3 import EAGLE3_IGNORED, Eagle3Config, Eagle3Layers, eagle3_parts
from soothsay.drafters.heads.feature_drafter import load_head
from soothsay.drafters.heads.one_pass_drafter import MaskRowsDrafter
from soothsay.drafters.heads.trained_head import OnePassHead, TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.decoder.blocks import Block, Blocks
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import normal

MOST_GUESSES = 1024
"""Limit of guesses in one pass. Published heads make up to 8."""


@dataclass(frozen=True)
class PEagleConfig:
    """Configuration of P-EAGLE's head."""

    first: Eagle3Config
    """Configuration of EAGLE-3's part. Its `block.num_layers` is the number of all decoder blocks."""

    mask: int
    """The token of the rows after the root."""

    depth: int
    """Number of guesses in one pass that the head was made for."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        tokens = self.first.block.vocab_size
        if not 0 <= self.mask < tokens or not 1 <= self.depth <= MOST_GUESSES:
            raise DrafterError(
                f"peagle with mask_token_id={self.mask} of {tokens} tokens, {self.depth} guesses: the mask "
                f"must be a token, and there must be 1 to {MOST_GUESSES:,} guesses"
            )


class PEagleHead(Eagle3Layers, OnePassHead):
    """EAGLE-3's layers and more decoder blocks. Rows after the root read a mask and a learned state.

    The root's row makes guess 1, the k-th mask row makes guess k + 1.
    """

    method = "peagle"

    def __init__(self, config: PEagleConfig, kernels: Kernels):
        super().__init__(config.first, kernels)
        c = config.first.block
        self.config, more = config, c.layers[1:]
        self.more = Blocks(Block(layer, c.hidden_size, kernels) for layer in more) if more else None
        width = len(self.taps) * config.first.target_hidden_size
        # in place of the taps of one token, end to end
        self.mask_hidden = nn.Parameter(normal(width, std=1.0))

    def mask_row(self, shared: TargetEnds) -> tuple[Tensor, Tensor]:
        """What mask rows read, in place of an embedding and a fused feature: `[1, H]` float32 each."""
        token = send([self.config.mask], self.mask_hidden.device)
        taps = self.mask_hidden.float()[None].chunk(len(self.taps), dim=-1)
        return self.embed(token, shared), self.fuse(taps, shared)

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Run one pass.

        Args:
            embedded: `[N, H]` float32, the embedding of each row's token; mask rows as `mask_row` says.
            features: `[N, H]` float32, the fused feature of the token before; mask rows as `mask_row` says.
            batch: the rows' places.
            kv: keys and values of each block, `[2 * H_kv, S, d]`; None: they exist during the pass only.

        Returns:
            `[N, H]` float32, not normed.
        """
        x = self.run_block(embedded, features, batch, None if kv is None else kv[0])
        if self.more is None:
            return x
        rope, last = self.rope(batch.positions), len(self.more)
        out: Tensor = self.more(x, (rope, rope), batch, None if kv is None else kv[1:], range(last))[last]
        return out


DEPTH = 8
"""Guesses in one pass, where the configuration states none: what P-EAGLE's heads are trained for."""


def open_peagle(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open P-EAGLE. Its blocks after the first are numbered on, or from 0 beside a `midlayer`."""
    if "mask_hidden" not in files.names:
        raise DrafterError(f"{files.path} has no mask_hidden, P-EAGLE's state of masks: it is incomplete")
    numbers = {int(n) for name in files.names for n in re.findall(r"^layers\.(\d{1,5})\.", name)}
    if not any(name.startswith("midlayer.") for name in files.names):
        numbers -= {0}
    parts = eagle3_parts(files, fit, 1 + len(numbers), residual=False)
    names = dict(parts.names)
    for place, number in enumerate(sorted(numbers)):
        check_block(files, files.config, f"layers.{number}.")
        names |= block_names(f"more.{place}.", f"layers.{number}.")
    width = len(parts.config.taps) * parts.config.target_hidden_size
    if files.read("mask_hidden").numel() != width:
        raise DrafterError(
            f"{files.path}: mask_hidden is {list(files.shape('mask_hidden'))} and should have {width:,} "
            "numbers: it is damaged, or another target's"
        )
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = int(methods[0].get("speculative_tokens", DEPTH))
    first = replace(parts.config, norm_output=False)
    config = PEagleConfig(first, mask_token(files, files.config), depth)
    return StoredHead(
        fit,
        f"P-EAGLE ({parts.layout})",
        lambda: PEagleHead(config, fit.kernels_for(config.first.block)),
        names,
        {**parts.given, "mask_hidden": files.read("mask_hidden").reshape(-1)},
        ignored=EAGLE3_IGNORED,
    )


FORMAT = HeadFormat(
    open_peagle, lambda files: "mask_hidden" in files.names, speculators=("peagle",), fills_masks=True
)


class PEagle(MaskRowsDrafter[PEagleHead]):
    """Predicts all depths in one pass, and makes the best tree by their probabilities.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/peagle` beside the target's weights.
        depth: number of guesses in one pass; None: what the checkpoint says, or 8.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth that may be in the tree.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | PEagleHead = "",
        depth: int | None = None,
        nodes: int = 63,
        branch: int = 8,
        dtype: DType = "auto",
    ):
        check_at_least_one("peagle", depth=1 if depth is None else depth, nodes=nodes, branch=branch)
        served = load_head(PEagleHead, model, target, dtype)
        config = served.head.config
        super().__init__(target, served, config.first.block, depth or config.depth, nodes, branch)
        with torch.no_grad():
            self.mask_row = self.head.mask_row(self.shared)

    def learned_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """See `MaskRowsDrafter`. All rows are the same."""
        return self.mask_row
