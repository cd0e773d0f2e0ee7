"""Families with experts and attention of their own: DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash; Llama 4."""

from __future__ import annotations

from dataclasses import replace

from soothsay.errors import ModelError
from soothsay.model.families.decoder import (
    attentions,
    decoder,
    experts,
    head_norms,
    latent_attentions,
    query_growth,
)
from soothsay.model.families.fields import require
from soothsay.model.families.layer_fields import (
    Raw,
    count,
    heads_of,
    main_rope,
    of_type,
    rotations,
    scaled_context,
    unrotated,
)
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec


def deepseek_v2(raw: Raw) -> ModelSpec:
    """`topk_method` says whether groups count."""
    raw = {"n_shared_experts": 2, **raw}
    method = raw.get("topk_method", "greedy")
    require(
        method in ("greedy", "group_limited_greedy"),
        f"topk_method {method!r} is not supported in DeepSeek-V2",
    )
    require(not raw.get("norm_topk_prob"), "norm_topk_prob is not supported in DeepSeek-V2")
    if method == "greedy":
        raw = {**raw, "n_group": 1, "topk_group": 1}
    return decoder(raw, latent_attentions(raw), experts(raw))


def deepseek_v3(raw: Raw) -> ModelSpec:
    """Experts are chosen by sigmoids with a correction, from the best groups."""
    raw = {"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, **raw}
    return decoder(raw, latent_attentions(raw), experts(raw, correction="e_score_correction_bias"))


def glm4_moe_lite(raw: Raw) -> ModelSpec:
    """`mlp_layer_types` takes the place of `first_k_dense_replace`."""
    raw = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **raw}
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return deepseek_v3(raw)
    require(
        len(kinds) == count(raw), f"mlp_layer_types has {len(kinds)} entries, one for each layer is needed"
    )
    if unknown := set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"config.json: mlp_layer_types has {min(unknown)!r}, which is not dense or sparse")
    listed = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return deepseek_v3({**raw, "mlp_only_layers": listed, "first_k_dense_replace": 0})


DEFAULTS = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}


def llama4(raw: Raw) -> ModelSpec:
    """`moe_layers` have experts, and other layers a size of their own.

    Most layers rotate, norm their heads and see chunks. The others do not, and their queries grow with the
    position.
    """
    raw = {**DEFAULTS, **raw}
    layers, step = count(raw), int(raw.get("interleave_moe_layer_step") or 1)
    sparse = raw.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    raw = {
        **raw,
        "n_shared_experts": 1,
        "moe_intermediate_size": raw["intermediate_size"],
        "intermediate_size": raw.get("intermediate_size_mlp", 16_384),
        "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse],
    }
    still, size = unrotated(raw), heads_of(raw)[2]
    chunk = -int(raw["attention_chunk_size"])
    windowed = of_type(raw, "chunked_attention", chunk, lambda raw: [not each for each in unrotated(raw)])
    growth = None
    if raw.get("attn_temperature_tuning", True):
        span, context = int(raw.get("floor_scale") or 8192), scaled_context(raw, main_rope(raw, size))
        growth = query_growth(raw.get("attn_scale", 0.1), span, context, "floor_scale", shift=1)
    norms = head_norms(raw, learned=False) if raw.get("use_qk_norm", True) else None

    def own(attention: AttentionSpec, is_still: bool) -> AttentionSpec:
        return replace(attention, growth=growth) if is_still else replace(attention, norms=norms)

    rotated = rotations(raw, neighbours=True, unrotated=still)
    mixers = map(own, attentions(raw, windowed, rotated), still)
    return decoder(raw, [*mixers], experts(raw, routing={"sigmoid": True, "scales_inputs": True}))
