"""How a Nemotron-H `config.json` becomes a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soothsay.config import ModelConfig
from soothsay.errors import ModelError

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
}
"""What files may leave out, as transformers has it."""

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""

OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def rewritten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the usual keys. Raises `ModelError` for a model that is not supported."""
    kinds = _kinds(raw)
    if raw.get("mamba_hidden_act", "silu") != "silu":
        raise ModelError("config.json: mamba_hidden_act is supported only as silu")
    if raw.get("attention_bias"):
        raise ModelError("config.json: attention_bias is supported only as false")
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "moe"]
    return {
        **raw,
        "num_hidden_layers": len(kinds),
        # layers without attention count as those that keep no state
        "layer_types": [kind if kind == "linear_attention" else "full_attention" for kind in kinds],
        "layers_block_type": kinds,
        "num_local_experts": int(raw["n_routed_experts"]) if sparse else 0,
        "mlp_only_layers": [layer for layer in range(len(kinds)) if layer not in sparse],
        "mamba_n_heads": raw["mamba_num_heads"],
        "mamba_d_ssm": int(raw["mamba_num_heads"]) * int(raw["mamba_head_dim"]),
        "mamba_d_head": raw["mamba_head_dim"],
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw["ssm_state_size"],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": raw.get("use_conv_bias", True),
        "mamba_proj_bias": raw.get("use_bias", False),
    }


def finished(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The configuration with the fields that only Nemotron-H has."""
    kinds, experts, latent = raw["layers_block_type"], config.experts, raw.get("moe_latent_size")
    if experts is not None:
        shared = int(raw["moe_shared_expert_intermediate_size"])
        experts = replace(experts, shared_size=shared, latent_size=None if latent is None else int(latent))
    parts = tuple(layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe"))
    return replace(config, experts=experts, feed_forward_layers=parts)


def _kinds(raw: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer. At least one should have attention."""
    listed = raw.get("layers_block_type")
    if listed is None:
        pattern = raw["hybrid_override_pattern"]
        kinds = [KINDS.get(letter, letter) for letter in pattern]
    else:
        kinds = [OLDER_KINDS.get(kind, kind) for kind in listed]
    if unknown := set(kinds) - set(KINDS.values()):
        raise ModelError(f"config.json: layers of kind {min(unknown)!r:.40} are not supported")
    if "full_attention" not in kinds:
        raise ModelError("config.json: a model without attention is not supported")
    return kinds
