"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, every, rotations
from soothsay.model.families.part_fields import attentions, dense, experts, norm_eps, state_space
from soothsay.model.specs.feed_forward_spec import SQUARED_RELU
from soothsay.model.specs.model_spec import MLPSpec, ModelSpec

DEFAULTS: Raw = {
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

MIXERS = ("linear_attention", "full_attention")
KNOWN = {SQUARED_RELU: SQUARED_RELU}  # activations
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h(raw: Raw) -> ModelSpec:
    """Each layer is one part, and none rotates."""
    raw = {**DEFAULTS, **raw}
    kinds = _kinds(raw)
    if raw.get("mamba_hidden_act", "silu") != "silu":
        raise ModelError("config.json: mamba_hidden_act is supported only as silu")
    if raw.get("attention_bias"):
        raise ModelError("config.json: attention_bias is supported only as false")
    raw = {
        **raw,
        "num_hidden_layers": len(kinds),
        "layer_types": None,
        "hidden_act": raw.get("mlp_hidden_act", SQUARED_RELU),
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "mamba_n_heads": raw["mamba_num_heads"],
        "mamba_d_ssm": int(raw["mamba_num_heads"]) * int(raw["mamba_head_dim"]),
        "mamba_d_head": raw["mamba_head_dim"],
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw["ssm_state_size"],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": raw.get("use_conv_bias", True),
        "mamba_proj_bias": raw.get("use_bias", False),
    }
    still = rotations(raw, unrotated=every(raw))
    parts: dict[str, Sequence[Any]] = {
        "full_attention": attentions(raw, rotated=still),
        "linear_attention": [state_space(raw, norm_eps(raw))] * len(kinds),
        "mlp": dense(raw, KNOWN),
        "moe": _experts(raw) if "moe" in kinds else (),
    }
    mixers = [parts[kind][i] if kind in MIXERS else None for i, kind in enumerate(kinds)]
    mlps = [None if kind in MIXERS else parts[kind][i] for i, kind in enumerate(kinds)]
    return decoder(raw, mixers, mlps)


def _experts(raw: Raw) -> Sequence[MLPSpec]:
    latent, shared = raw.get("moe_latent_size"), int(raw["moe_shared_expert_intermediate_size"])
    return experts(
        {**raw, "num_local_experts": int(raw["n_routed_experts"])},
        known=KNOWN,
        correction="e_score_correction_bias",
        shared_size=shared,
        latent_size=None if latent is None else int(latent),
    )


def _kinds(raw: Raw) -> Sequence[str]:
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
