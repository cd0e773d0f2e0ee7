"""Nemotron-H in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.model.formats.gguf_config import Header


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that only Nemotron-H has. MTP modules are the last blocks.

    A block with key-value heads has attention, one with a feed-forward size is a feed-forward part, and the
    others are Mamba-2's.
    """
    get, require, blocks = header.number, header.require, int(config["num_hidden_layers"])
    layers = blocks - get("nextn_predict_layers", 0)
    kv, sizes = (
        header.layers(key, blocks)[:layers] for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = [
        "full_attention" if heads else ("mlp" if size else "linear_attention")
        for heads, size in zip(kv, sizes, strict=True)
    ]
    heads = max(require("ssm.time_step_rank"), 1)
    own = {
        "layers_block_type": kinds,
        "num_hidden_layers": layers,
        "num_key_value_heads": max(kv, default=0) or 1,
        "intermediate_size": max(sizes, default=0) or 1,
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in shapes),
        "mamba_num_heads": heads,
        "mamba_head_dim": require("ssm.inner_size") // heads,
        "n_groups": require("ssm.group_count"),
        "ssm_state_size": require("ssm.state_size"),
        "conv_kernel": require("ssm.conv_kernel"),
    }
    if not get("expert_count", 0):
        return own
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(layers)]
    groups = get("expert_group_count", 0) or 1
    return {
        **own,
        **header.experts(),
        "layers_block_type": ["moe" if has else kind for has, kind in zip(sparse, kinds, strict=True)],
        "n_routed_experts": require("expert_count"),
        "moe_shared_expert_intermediate_size": require("expert_shared_feed_forward_length"),
        "moe_latent_size": get("moe_latent_size"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", True)),
        "routed_scaling_factor": get("expert_weights_scale", 0) or 1.0,
        "n_group": groups,
        "topk_group": get("expert_group_used_count", 0) or groups,
    }
