"""Decoder blocks with experts in heads' checkpoints: their names, and what their configuration says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.model.tensor_names import BLOCK_NAMES, FAMILY_NAMES

FAMILIES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "glm4_moe")
"""Families whose MTP modules have experts in blocks that are computed."""


def has_experts(files: DrafterFiles, raw: Mapping[str, Any], prefix: str) -> bool:
    """Whether the block at `prefix` has experts as `FAMILIES` have them."""
    return raw.get("model_type") in FAMILIES and f"{prefix}mlp.gate.weight" in files.names


def expert_names(
    files: DrafterFiles, raw: Mapping[str, Any], ours: str, theirs: str
) -> dict[str, tuple[str, ...]]:
    """The table of names of a block's experts, empty if it has none. Prefixes end in a dot. See `Names`."""
    if not has_experts(files, raw, theirs):
        return {}
    family = {**BLOCK_NAMES, **FAMILY_NAMES.get(str(raw["model_type"]), {})}
    pattern = re.escape(theirs) + r"mlp\.experts\.(\d{1,6})\.down_proj\.weight"
    experts = [int(found[1]) for name in files.names if (found := re.fullmatch(pattern, name))]
    names = {}
    for module in ("mlp.router", "mlp.shared.gate_up", "mlp.shared.down", "mlp.shared_gate"):
        if module in family:
            names[ours + module] = tuple(theirs + tensor for tensor in family[module])
    for expert in experts:
        for part in ("gate_up", "down"):
            tensors = family[f"mlp.experts.{part}"]
            names[f"{ours}mlp.experts.{expert}.{part}"] = tuple(theirs + t.format(expert) for t in tensors)
    correction = "e_score_correction_bias"
    names[f"{ours}mlp.correction.{correction}"] = (f"{theirs}mlp.gate.{correction}",)
    return names


def expert_settings(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What a configuration says of `layers` blocks, all with experts and full attention."""
    return {
        "model_type": raw["model_type"],
        "layer_types": ["full_attention"] * layers,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0,
        "mlp_layer_types": None,
    }
