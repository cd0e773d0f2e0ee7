"""EAGLE-1, EAGLE-3 and EAGLE-3.1, as SafeAILab, vLLM, SGLang and vLLM's speculators write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soothsay.drafters.heads.checkpoints.block_configs import (
    block_config,
    check_block,
    check_one_block,
    hf_config,
    refusal,
    speculators_config,
)
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit, draft_vocabulary
from soothsay.drafters.heads.checkpoints.stored_head import (
    HeadFormat,
    Names,
    StoredHead,
    Written,
    block_names,
    split,
)
from soothsay.drafters.heads.eagle3.eagle3_head import Eagle3Config, Eagle3Head, TapNorms
from soothsay.errors import DrafterError


def eagle3_names(layer: str) -> Names:
    """EAGLE-3's table of names. `layer` is the prefix of the block's tensors and ends in a dot."""
    return {
        "embedding": ("embed_tokens",),
        "fc": ("fc",),
        "norm": ("norm",),
        "head": ("lm_head",),
        **block_names("block.", layer),
        "embedding_norm": (f"{layer}input_layernorm",),
        "hidden_norm": (f"{layer}hidden_norm",),
    }


EAGLE3_IGNORED = r"t2d|embed_tokens\.weight|verifier_(norm|lm_head)\.weight"
"""Tensors of EAGLE-3 that repeat others, or are copies of the target's."""


def is_eagle3(files: DrafterFiles) -> bool:
    """Whether the tensors are EAGLE-3's."""
    return any(f"{layer}hidden_norm.weight" in files.names for layer in ("midlayer.", "layers.0."))


def open_eagle3(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open EAGLE-3 in the original layout, vLLM's, or speculators'."""
    check_one_block(files)
    parts = eagle3_parts(files, fit)
    return StoredHead(
        files,
        fit,
        f"EAGLE-3 ({parts.layout})",
        lambda: Eagle3Head(parts.config, fit.kernels_for(parts.config.block)),
        parts.names,
        parts.given,
        ignored=EAGLE3_IGNORED,
    )


@dataclass(frozen=True)
class Eagle3Parts:
    """What EAGLE-3 and P-EAGLE have in common in their checkpoints."""

    config: Eagle3Config
    layout: str
    names: Names
    given: Mapping[str, Tensor]


def eagle3_parts(files: DrafterFiles, fit: TargetFit, layers: int = 1, residual: bool = True) -> Eagle3Parts:
    """Read the parts that EAGLE-3 and P-EAGLE have in common, and check them.

    Args:
        files: the checkpoint.
        fit: the target.
        layers: number of decoder blocks.
        residual: the default of `norm_before_residual` in speculators' layout.
    """
    speculators = "speculators_model_type" in files.config
    raw = files.config.get("transformer_layer_config", {}) if speculators else files.config
    layer = "midlayer." if "midlayer.hidden_norm.weight" in files.names else "layers.0."
    check_block(files, raw, layer)
    names = eagle3_names(layer)
    block = block_config(files, raw, names, "block.", layers)
    target_size = int(files.config.get("target_hidden_size") or block.hidden_size)
    own = "embed_tokens.weight" in files.names
    fit.check(hidden=target_size, vocab=block.vocab_size)
    if not own:  # the head reads the target's embedding
        fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_context(block.max_positions)
    taps = _taps(files, fit.config.num_layers)
    fit.check_taps(taps)
    given, draft = draft_vocabulary(files, block, fit)
    if own and fit.has_embedding(files.read("embed_tokens.weight")):
        own = False
    config = Eagle3Config(
        block,
        target_size,
        draft,
        taps,
        bool(files.config.get("norm_before_residual", speculators and residual)),
        own,
        _tap_norms(files),
        bool(files.config.get("norm_output", False)),
    )
    layout = "speculators" if speculators else "original" if layer == "midlayer." else "vLLM"
    return Eagle3Parts(config, layout, names, given)


def write_eagle3(head: Eagle3Head, target: str) -> Written:
    """Make config.json and tensors as SafeAILab's code, SGLang and vLLM read them.

    config.json states the taps twice: vLLM numbers layers by their inputs, SGLang by their outputs.
    """
    c = head.config
    config = {
        **hf_config(c.block),
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": c.target_hidden_size,
        "draft_vocab_size": c.draft_vocab_size,
        **_norm_flags(c),
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps],
        },
    }
    return config, _eagle3_tensors(head, "midlayer.")


def write_speculators_eagle3(head: Eagle3Head, target: str) -> Written:
    """Make config.json and tensors as vLLM's speculators reads them."""
    c = head.config
    config = {
        **speculators_config("eagle3", "Eagle3Speculator", target),
        "transformer_layer_config": hf_config(c.block),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.block.hidden_size else c.target_hidden_size,
        **_norm_flags(c),
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
    }
    return config, _eagle3_tensors(head, "layers.0.")


def _eagle3_tensors(head: Eagle3Head, layer: str) -> Iterator[tuple[str, Tensor]]:
    whole = head.config.draft_vocab_size == head.config.block.vocab_size
    for name, tensor in split(head, eagle3_names(layer), head.config.block):
        if name != "d2t" or not whole:
            yield name, tensor
    if not whole:
        t2d = torch.zeros(head.config.block.vocab_size, dtype=torch.bool)
        t2d[head.token_ids.cpu()] = True
        yield "t2d", t2d


def _norm_flags(config: Eagle3Config) -> dict[str, bool]:
    """The keys of config.json that say what is normed, as vLLM and speculators read them."""
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_taps == "whole",
        "fc_norm": config.norm_taps == "each",
        "norm_output": config.norm_output,
    }


def _tap_norms(files: DrafterFiles) -> TapNorms:
    """What is normed before `fc`. Raises `DrafterError` if the configuration says two things."""
    each, whole = (bool(files.config.get(key, False)) for key in ("fc_norm", "norm_before_fc"))
    if each and whole:
        raise DrafterError(
            f"{files.path}: config.json sets fc_norm and norm_before_fc, and a head has one: it is damaged"
        )
    return "each" if each else "whole" if whole else "none"


def _taps(files: DrafterFiles, layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads."""
    config = files.config
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise refusal(files, "it reads the target's last layer only (use_aux_hidden_state is false)")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids:  # vLLM: i means the input of layer i
        return tuple(int(i) for i in ids)
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids:  # SGLang: i means the output of layer i
        return tuple(int(i) + 1 for i in ids)
    return 2, layers // 2, layers - 3


FORMAT = HeadFormat(
    "eagle3",
    open_eagle3,
    is_eagle3,
    speculators=("eagle3",),
    layouts={"": write_eagle3, "speculators": write_speculators_eagle3},
    integers=True,
)
