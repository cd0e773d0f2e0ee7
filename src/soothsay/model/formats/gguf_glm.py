"""What GGUF files of GLM-4.5 have: names of tensors, and keys of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.model.formats.gguf_config import Header


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that GLM-4.5 has. `shapes` are those of the tensors by GGUF's names."""
    return expert_config(header, config) | {
        "norm_topk_prob": bool(header.get("expert_weights_norm", True)),
        "n_group": header.number("expert_group_count", 1),
        "topk_group": header.number("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def expert_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers without MTP modules, and the keys of experts that DeepSeek's files have too."""
    experts = header.require("expert_count")
    return {
        "num_hidden_layers": config["num_hidden_layers"] - header.number("nextn_predict_layers", 0),
        "n_routed_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": header.require("expert_used_count"),
        "moe_intermediate_size": header.require("expert_feed_forward_length"),
        "n_shared_experts": header.number("expert_shared_count", 0),
        "first_k_dense_replace": header.number("leading_dense_block_count", 0),
        "routed_scaling_factor": header.number("expert_weights_scale", 0) or 1.0,
    }
