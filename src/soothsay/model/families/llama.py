"""Families that are Llama but for a few fields."""

from __future__ import annotations

from soothsay.errors import ModelError
from soothsay.model.families.decoder import llama_like
from soothsay.model.families.layer_fields import (
    Raw,
    even,
    every,
    heads_of,
    main_rope,
    rotations,
    scaled_context,
    unrotated,
    windows,
)
from soothsay.model.families.part_fields import experts, head_norms, query_growth
from soothsay.model.specs.feed_forward_spec import CLIPPED
from soothsay.model.specs.model_spec import ModelSpec


def phi3(raw: Raw) -> ModelSpec:
    """Phi-3 and Phi-4: files say which share of each head rotates."""
    return llama_like(raw, windows(raw, every, reads_types=False), rotations(raw, share=1.0))


def mistral(raw: Raw) -> ModelSpec:
    """Mistral: a `sliding_window` holds for all layers."""
    return llama_like(raw, windows(raw, every, reads_types=False))


def mixtral(raw: Raw) -> ModelSpec:
    """Mixtral: Mistral with experts."""
    raw = {"rope_theta": 1e6, **raw}
    mlps = experts(raw, routing={"normalize": True})
    return llama_like(raw, windows(raw, every, reads_types=False), mlps=mlps)


def ministral3(raw: Raw) -> ModelSpec:
    """Ministral 3: queries grow with the position, by `llama_4_scaling_beta` among the rotary parameters."""
    raw = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **raw}
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    beta, rope = scaling.get("llama_4_scaling_beta"), main_rope(raw, heads_of(raw)[2])
    growth = None
    if beta is not None:
        span, context = rope.original_max_positions, scaled_context(raw, rope)
        growth = query_growth(beta, span, context, "original_max_position_embeddings")
    return llama_like(raw, windows(raw, every, reads_types=False), growth=growth)


def smollm3(raw: Raw) -> ModelSpec:
    """SmolLM3: some layers do not rotate, and only these may have windows."""
    raw = {"tie_word_embeddings": True, "rope_theta": 2e6, **raw}
    rotated = rotations(raw, unrotated=unrotated(raw))
    return llama_like(raw, windows(raw, unrotated, has_switch=True), rotated)


def ernie(raw: Raw) -> ModelSpec:
    """ERNIE 4.5: `use_bias` is about all linear layers of a block, and neighbours rotate together."""
    biased = bool(raw.get("use_bias", False))
    defaults = {"tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "head_dim": 128}
    raw = {**defaults, **raw, "attention_bias": biased, "mlp_bias": biased}
    return llama_like(raw, rotated=rotations(raw, neighbours=True))


def seed_oss(raw: Raw) -> ModelSpec:
    """Seed-OSS: attention's output has no bias."""
    if raw.get("attention_out_bias"):
        raise ModelError("config.json: attention_out_bias is supported only as false")
    return llama_like({"attention_bias": True, "head_dim": 128, **raw}, o_bias=False)


def gpt_oss(raw: Raw) -> ModelSpec:
    """gpt-oss: sinks, windows in every other layer, experts with biases and an own activation."""
    for key, value in {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}.items():
        if raw.get(key, value) != value:
            raise ModelError(f"config.json: {key} {raw[key]!r:.80} is not supported, only {value}")
    defaults = {"attention_bias": True, "rope_theta": 1.5e5, "rms_norm_eps": 1e-5}
    raw = {**defaults, "head_dim": 64, "sliding_window": 128, **raw, "mlp_bias": True}
    # the weights are the softmax of the chosen scores alone
    mlps = experts(raw, known=CLIPPED_SILU, routing={"normalize": True}, router_bias=True)
    return llama_like(raw, windows(raw, even), mlps=mlps, sinks=True)


CLIPPED_SILU = {"silu": CLIPPED, "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Activations of gpt-oss."""


def minimax_m2(raw: Raw) -> ModelSpec:
    """MiniMax-M2: norms of all queries and all keys. `rotary_dim` is the number of dimensions that rotate."""
    raw = {"rope_theta": 5e6, "head_dim": 128, **raw}
    if "rotary_dim" in raw:
        raw = {**raw, "partial_rotary_factor": int(raw["rotary_dim"]) / int(raw["head_dim"])}
    mlps = experts(raw, correction="e_score_correction_bias", routing={"normalize": True})
    rotated = rotations(raw, share=1.0)
    return llama_like(raw, rotated=rotated, mlps=mlps, norms=head_norms(raw, over_heads=True))
