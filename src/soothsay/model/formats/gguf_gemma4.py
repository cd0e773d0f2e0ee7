"""What GGUF files of Gemma 4 have: layers of two kinds, with sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.families.gemma4 import GLOBAL, LOCAL
from soothsay.model.formats.gguf_config import Header


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that only Gemma 4 has. `shapes` are those of the tensors by GGUF's names."""
    get, layers = header.number, int(config["num_hidden_layers"])
    kinds = [
        LOCAL if local else GLOBAL for local in header.layers("attention.sliding_window_pattern", layers)
    ]
    kv = dict(zip(reversed(kinds), reversed(header.layers("attention.head_count_kv", layers)), strict=True))
    sizes = header.layers("feed_forward_length", layers)
    keys_are_values = any(
        f"blk.{layer}.attn_k.weight" in shapes and f"blk.{layer}.attn_v.weight" not in shapes
        for layer in range(layers)
    )
    own = {
        "layer_types": kinds,
        "head_dim": get("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": kv.get(LOCAL, kv[GLOBAL]) if GLOBAL in kv else kv[LOCAL],
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "intermediate_size": min(sizes),
        "sliding_window": header.require("attention.sliding_window"),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,
        "final_logit_softcapping": get("final_logit_softcapping"),
    }
    if keys_are_values:
        own["num_global_key_value_heads"] = kv.get(GLOBAL)
    if count := get("expert_count", 0):
        own |= {
            "enable_moe_block": True,
            "num_experts": count,
            "num_local_experts": count,
            "top_k_experts": header.require("expert_used_count"),
            "moe_intermediate_size": header.require("expert_feed_forward_length"),
        }
    return own


def rope_parameters(header: Header, divisors: Tensor | None) -> dict[str, Any]:
    """How heads rotate, by kind of layer. `divisors` `[d / 2]` are huge where global heads do not rotate.

    Raises `ModelError` for other divisors.
    """
    share = 1.0
    if divisors is not None:
        still = divisors >= 1e29
        if not bool((still | (divisors == 1)).all()) or not len(divisors) or bool(still.diff().lt(0).any()):
            raise ModelError(f"{header.path}: rope_freqs.weight has frequencies that Gemma 4 does not have")
        share = float((~still).float().mean())
    base, local = header.number("rope.freq_base", 1e6), header.number("rope.freq_base_swa", 1e4)
    return {
        GLOBAL: {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share},
        LOCAL: {"rope_type": "default", "rope_theta": local},
    }
