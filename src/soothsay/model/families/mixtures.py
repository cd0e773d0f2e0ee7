"""Families with experts, whose attention is like Llama's."""

from __future__ import annotations

from functools import partial

from soothsay.model.families.classic import LAYER_NORM
from soothsay.model.families.decoder import attentions, decoder, experts, head_norms, llama_like
from soothsay.model.families.fields import require, require_only
from soothsay.model.families.layer_fields import Raw, all_but_each, count, every, last, rotations, windows
from soothsay.model.families.llama import AFTER, ernie_keys, exaone_layers, hunyuan_keys
from soothsay.model.specs.model_spec import EmbeddingSpec, ModelSpec

corrected = partial(experts, correction="e_score_correction_bias")
"""Experts that are chosen as in DeepSeek-V3."""


def mixtral(raw: Raw) -> ModelSpec:
    """Mixtral: Mistral with experts."""
    raw = {"rope_theta": 1e6, **raw}
    mlps = experts(raw, routing={"normalize": True})
    return llama_like(raw, windows(raw, every, reads_types=False), mlps=mlps)


def phimoe(raw: Raw) -> ModelSpec:
    """PhiMoE: layer norms, and experts that are chosen by SparseMixer. longrope's factor is in the file."""
    raw = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **raw}
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling: Raw = raw.get(key) or {}
    if "long_mscale" in scaling:
        factor = scaling["long_mscale"]
        require(factor == scaling.get("short_mscale"), "short_mscale and long_mscale should be equal")
        raw = {**raw, key: {**scaling, "attention_factor": factor}}
    mlps = experts(raw, routing={"within": 2 * float(raw.get("router_jitter_noise", 0.01))})
    layer = {"norm": LAYER_NORM, "head_bias": bool(raw.get("lm_head_bias", False))}
    return llama_like(raw, windows(raw, every, reads_types=False), mlps=mlps, layer=layer)


def minimax_m2(raw: Raw) -> ModelSpec:
    """MiniMax-M2: norms of all queries and all keys. `rotary_dim` is the number of dimensions that rotate."""
    raw = {"rope_theta": 5e6, "head_dim": 128, **raw}
    if "rotary_dim" in raw:
        raw = {**raw, "partial_rotary_factor": int(raw["rotary_dim"]) / int(raw["head_dim"])}
    mlps = corrected(raw, routing={"normalize": True})
    rotated = rotations(raw, share=1.0)
    return llama_like(raw, rotated=rotated, mlps=mlps, norms=head_norms(raw, over_heads=True))


def olmoe(raw: Raw) -> ModelSpec:
    """OLMoE: all queries are normed together, and all keys."""
    require(not raw.get("clip_qkv"), "clip_qkv is not supported; take another model")
    raw = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, **raw}
    return llama_like(raw, mlps=experts(raw), norms=head_norms(raw, over_heads=True))


def flex_olmo(raw: Raw) -> ModelSpec:
    """FlexOLMo: OLMo 2 with experts."""
    raw = {"rope_theta": 5e5, "num_experts_per_tok": 5, **raw}
    return llama_like(raw, mlps=experts(raw), norms=head_norms(raw, over_heads=True), layer=AFTER)


def glm4_moe(raw: Raw) -> ModelSpec:
    """GLM-4.5: experts as in DeepSeek-V3. Heads are normed if the file says so."""
    defaults = {"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True}
    raw = {"rms_norm_eps": 1e-5, **defaults, **raw}
    norms = head_norms(raw) if raw.get("use_qk_norm") else None
    mlps = corrected(raw)
    return llama_like(raw, None, rotations(raw, share=0.5), mlps, norms=norms, o_bias=False)


def bailing_moe(raw: Raw) -> ModelSpec:
    """Ling and Ring, whose code comes with their weights: since 2.0 as GLM-4.5, before by a softmax."""
    raw = {"norm_topk_prob": True, "num_shared_experts": 0, **raw}
    require_only(raw, norm_head=False, multi_gate=False, norm_softmax=False)
    is_second = raw.get("score_function") == "sigmoid"
    mlps = experts(raw, correction="expert_bias" if is_second else None)
    bias, o_bias = bool(raw.get("use_qkv_bias")), bool(raw.get("use_bias"))
    norms = head_norms(raw) if raw.get("use_qk_norm", is_second) else None
    return llama_like(raw, None, rotations(raw, share=1.0), mlps, norms=norms, bias=bias, o_bias=o_bias)


def solar_open(raw: Raw) -> ModelSpec:
    """Solar Open: all layers have experts, and attention's output has no bias."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "norm_topk_prob": True}
    raw = {"intermediate_size": raw["moe_intermediate_size"], "n_shared_experts": 1, **defaults, **raw}
    return llama_like(raw, mlps=corrected(raw), o_bias=False)


def dots1(raw: Raw) -> ModelSpec:
    """dots.llm1: the attention of Qwen3, and the experts of DeepSeek-V3."""
    raw = {"max_window_layers": 62, **raw}
    return llama_like(raw, windows(raw, last), mlps=corrected(raw), norms=head_norms(raw))


def hy_v3(raw: Raw) -> ModelSpec:
    """Hunyuan 3: all layers but the first have experts."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "head_dim": 128, "first_k_dense_replace": 1}
    raw = {
        **defaults,
        "num_shared_experts": 1,
        "routed_scaling_factor": raw.get("router_scaling_factor", 2.826),
        **raw,
    }
    mlps = experts(raw, correction="expert_bias", routing={"normalize": True})
    return llama_like(raw, mlps=mlps, norms=head_norms(raw))


def hunyuan_v1_moe(raw: Raw) -> ModelSpec:
    """Hunyuan with experts, which are as large as the part beside them."""
    raw = hunyuan_keys({**raw, "num_experts_per_tok": raw["moe_topk"]})
    mlps = experts(raw, shared_size=int(raw["intermediate_size"]), routing={"normalize": True})
    return llama_like(raw, mlps=mlps, norms=head_norms(raw, last=True))


def exaone_moe(raw: Raw) -> ModelSpec:
    """K-EXAONE."""
    defaults = {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "num_shared_experts": 1}
    raw = {**defaults, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, **raw}
    return llama_like(raw, *exaone_layers(raw), corrected(raw), norms=head_norms(raw))


def mellum(raw: Raw) -> ModelSpec:
    """Mellum 2: layers with a window rotate by an embedding of their own."""
    raw = {"norm_topk_prob": True, "head_dim": 128, **raw}
    windowed = windows(raw)
    return llama_like(raw, windowed, rotations(raw, local=windowed), experts(raw), norms=head_norms(raw))


def afmoe(raw: Raw) -> ModelSpec:
    """Trinity: gated attention, whose layers without a window do not rotate, and norms around all parts."""
    defaults = {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024, "num_shared_experts": 2}
    raw = {**defaults, "routed_scaling_factor": raw.get("route_scale", 1.0), **raw}
    raw = {**raw, "first_k_dense_replace": raw.get("num_dense_layers", 1)}
    pattern = int(raw.get("global_attn_every_n_layers", 4))
    windowed = windows(raw, partial(all_but_each, pattern))
    rotated = rotations(raw, unrotated=[window is None for window in windowed])
    mixers = attentions(raw, windowed, rotated, norms=head_norms(raw), gated=True, gates_apart=True)
    mlps = experts(raw, correction="expert_bias", routing={"normalize": True})
    scale = int(raw["hidden_size"]) ** 0.5 if raw.get("mup_enabled") else 1.0
    return decoder(raw, mixers, mlps, embedding=EmbeddingSpec(scale), post_norms=True)


def ernie4_5_moe(raw: Raw) -> ModelSpec:
    """ERNIE 4.5 with experts, from `moe_layer_start_index` to `moe_layer_end_index`."""
    require_only(raw, use_bias=False)
    raw = ernie_keys(raw)
    end = int(raw.get("moe_layer_end_index", -1))
    end = count(raw) - 1 if end < 0 else end
    raw = {
        **raw,
        "num_experts": raw.get("moe_num_experts", 64),
        "num_experts_per_tok": raw.get("moe_k", 6),
        "n_shared_experts": raw.get("moe_num_shared_experts", 2),
        "first_k_dense_replace": raw.get("moe_layer_start_index", 1),
        "decoder_sparse_step": raw.get("moe_layer_interval", 1),
        "mlp_only_layers": range(end + 1, count(raw)),
    }
    mlps = corrected(raw, routing={"sigmoid": False, "normalize": True})
    return llama_like(raw, rotated=rotations(raw, neighbours=True), mlps=mlps)
