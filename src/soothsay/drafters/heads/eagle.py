"""EAGLE: one decoder block guesses the target's next features, and with them its next tokens.

EAGLE (Li et al. 2024, arXiv 2401.15077) fills a fixed tree. EAGLE-2 (Li et al. 2024, arXiv 2406.16858) has
the same weights, and grows a tree by confidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.batch import Batch
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.block_configs import (
    block_config,
    check_block,
    check_one_block,
    hf_config,
)
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.stored_head import (
    HeadFormat,
    Names,
    StoredHead,
    Written,
    block_names,
    split,
)
from soothsay.drafters.heads.feature_drafter import load_head
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter, RecurrentDrafter
from soothsay.drafters.heads.trained_head import Head, RecurrentHead
from soothsay.drafters.trees.growth import TemplateShape
from soothsay.drafters.trees.templates import EAGLE_TEMPLATE, check_template
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.rope import Rope
from soothsay.model.families.fields import checked_fields
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.model_spec import ModelSpec


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of EAGLE's head, which shares the target's embedding and output head."""

    block: ModelSpec
    """The decoder block's. Its hidden size is that of the features; `num_layers` is 1."""

    bias: bool
    """Whether the layer that joins embedding and feature has a bias."""

    target_layers: int
    """Number of the target's decoder blocks. The feature is the normed output of the last one."""


class EagleHead(RecurrentHead):
    """One decoder block without a norm before its attention; its output is a guess of the next feature."""

    method = "eagle"
    config: EagleConfig

    def __init__(self, config: EagleConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels = config, kernels
        self.taps = (config.target_layers,)
        self.fc: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size, bias=config.bias)
        self.block = Block(c.layers[0], c.hidden_size, kernels, in_features=c.hidden_size)
        self.rope = Rope(c.rotations[0])

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`. The output is a guess of the next feature."""
        x = cast(Tensor, self.fc(torch.cat([embedded, features], dim=-1)))
        out: Tensor = self.block(x.float(), self.rope(batch.positions), batch, kv, x)
        return out


EAGLE: Names = block_names("block.", "layers.0.")


def open_eagle(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open EAGLE-1. Copies of the target's embedding and output head in the files are ignored."""
    raw = files.config
    if isinstance(raw.get("model"), dict):  # vLLM's wrapper
        raw = checked_fields({**raw["model"], "soothsay": raw.get("soothsay")}, f"{files.path}: model")
    check_one_block(files)
    check_block(files, raw, "layers.0.")
    block = block_config(files, raw, EAGLE, "block.")
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_layers((raw.get("soothsay") or {}).get("target_layers", fit.config.num_layers))
    fit.check_context(block.max_positions)
    config = EagleConfig(block, "fc.bias" in files.names, fit.config.num_layers)
    return StoredHead(
        fit,
        "EAGLE-1",
        lambda: EagleHead(config, fit.kernels_for(block)),
        EAGLE,
        ignored=r"(embed_tokens|lm_head)\.weight",
    )


def write_eagle(head: EagleHead, target: str) -> Written:
    """Make config.json and tensors as SafeAILab's code and vLLM read them."""
    block = head.config.block
    config = {
        **hf_config(block),
        "architectures": ["LlamaForCausalLM"],
        "bias": head.config.bias,
        "soothsay": {"target_layers": head.config.target_layers},
    }
    return config, split(head, EAGLE, block)


FORMAT = HeadFormat(
    open_eagle,
    lambda files: {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= files.names,
    layouts={"": write_eagle},
)


class Eagle(RecurrentDrafter):
    """EAGLE: a tree with the same shape at every step.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/eagle` beside the target's weights.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
        template: the tree as paths of ranks, each parent before its children.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        dtype: DType = "auto",
        template: Sequence[Sequence[int]] = EAGLE_TEMPLATE,
    ):
        check_template(template)
        super().__init__(target, load_head(EagleHead, model, target, dtype), TemplateShape(template))


class Eagle2(ConfidentDrafter):
    """EAGLE-2: EAGLE's head, with a tree that grows by confidence."""

    method, kind = "eagle2", EagleHead
