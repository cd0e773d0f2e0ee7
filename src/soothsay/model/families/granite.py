"""Granite 3 and 4: factors of embeddings, residuals, attention and logits, experts, and Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, are, count, rotations
from soothsay.model.families.part_fields import attentions, dense, experts, norm_eps, state_space
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import EmbeddingSpec, MixerSpec, MLPSpec, ModelSpec
from soothsay.model.specs.rope_spec import HeadRotation

MAMBA_DEFAULTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def granite(raw: Raw) -> ModelSpec:
    """Granite 3."""
    return _scaled(raw, _attentions(raw), dense(raw))


def granite_moe(raw: Raw) -> ModelSpec:
    """Granite 3 with experts."""
    return _scaled(raw, _attentions(raw), _experts(raw))


def granite_hybrid(raw: Raw) -> ModelSpec:
    """Granite 4: most layers are Mamba-2's. The others do not rotate, unless the file says so."""
    raw = {**MAMBA_DEFAULTS, **raw}
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    kinds = ["mamba"] * count(raw) if kinds is None else kinds
    usual = {"mamba": "linear_attention", "attention": "full_attention"}
    raw = {**raw, "layer_types": [usual.get(kind, kind) for kind in kinds]}
    if not raw["num_local_experts"]:
        if not raw["shared_intermediate_size"]:
            raise ModelError("config.json: without experts, shared_intermediate_size should be above 0")
        raw = {**raw, "intermediate_size": raw["shared_intermediate_size"]}
    still = [raw.get("position_embedding_type") != "rope"] * count(raw)
    read = _attentions(raw, rotations(raw, unrotated=still))
    own, is_own = state_space(raw, norm_eps(raw)), are("linear_attention", raw)
    mixers = [own if kept else other for kept, other in zip(is_own, read, strict=True)]
    return _scaled(raw, mixers, _experts(raw))


def _attentions(raw: Raw, rotated: Sequence[HeadRotation] | None = None) -> list[AttentionSpec]:
    return attentions(raw, rotated=rotated, scale=float(raw.get("attention_multiplier", 1.0)))


def _experts(raw: Raw) -> list[MLPSpec]:
    shared = int(raw.get("shared_intermediate_size") or 0)
    return experts(raw, shared_size=shared, routing={"normalize": True})


def _scaled(raw: Raw, mixers: Sequence[MixerSpec], mlps: Sequence[MLPSpec]) -> ModelSpec:
    return decoder(
        raw,
        mixers,
        mlps,
        embedding=EmbeddingSpec(float(raw.get("embedding_multiplier", 1.0))),
        residual=float(raw.get("residual_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )
