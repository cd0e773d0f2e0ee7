"""Latent attention: DeepSeek-V2 and V3, Kimi K2 and Linear, GLM-4.7-Flash, Mistral 4 and MiniCPM3."""

from collections.abc import Sequence
from dataclasses import replace

from soothsay.model.families.decoder import attentions, decoder, dense, experts, latent_attentions, norm_eps
from soothsay.model.families.fields import require, require_only, usual_keys
from soothsay.model.families.layer_fields import Raw, count, mixed
from soothsay.model.specs.attention_spec import NO_ROTATION, HeadRotation
from soothsay.model.specs.model_spec import EmbeddingSpec, MixerSpec, ModelSpec
from soothsay.model.specs.state_specs import KimiDeltaSpec


def deepseek_v2(raw: Raw) -> ModelSpec:
    """`topk_method` says whether groups count."""
    raw = {"n_shared_experts": 2, **raw}
    method = raw.get("topk_method", "greedy")
    require(
        method in ("greedy", "group_limited_greedy"),
        f"topk_method {method!r} is not supported in DeepSeek-V2",
    )
    require_only(raw, norm_topk_prob=False)
    if method == "greedy":
        raw = {**raw, "n_group": 1, "topk_group": 1}
    return decoder(raw, latent_attentions(raw), experts(raw))


def deepseek_v3(raw: Raw) -> ModelSpec:
    """Experts are chosen by sigmoids with a correction, from the best groups."""
    raw = {"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, **raw}
    return decoder(raw, latent_attentions(raw), experts(raw, correction="e_score_correction_bias"))


def deepseek_v32(raw: Raw) -> ModelSpec:
    """DeepSeek-V3.2 and GLM-5: an indexer chooses `index_topk` keys (DeepSeek Sparse Attention).

    It chooses all keys of shorter contexts. So contexts end there, and the indexer is not computed.
    """
    spec = deepseek_v3(raw)
    return replace(spec, max_positions=min(spec.max_positions, int(raw.get("index_topk", 2048))))


def glm_moe_dsa(raw: Raw) -> ModelSpec:
    """GLM-5."""
    return deepseek_v32({"rms_norm_eps": 1e-5, **raw})


KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Keys that Kimi Linear's files have in place of the usual ones."""

KIMI_PARTS = {
    **{"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"},
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The same in the object `linear_attn_config`."""

KIMI_DEFAULTS: Raw = {
    **{"max_position_embeddings": 2**20, "rms_norm_eps": 1e-5, "v_head_dim": 128, "norm_topk_prob": True},
    **{"num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 2.446, "linear_num_heads": 32, "linear_head_dim": 128},
    **{"linear_conv_kernel_dim": 4},
}
"""What files may leave out, as transformers has it."""

KIMI_K3 = "attn_res_block_size", "gate_lower_bound"
"""Keys of Kimi K3, whose layers read older layers and whose decays are bounded."""


def kimi_linear(raw: Raw) -> ModelSpec:
    """Kimi Delta Attention, and in each fourth layer latent attention that does not rotate."""
    own = raw.get("linear_attn_config", {})
    for key in KIMI_K3:
        require(key not in raw and key not in own, f"{key} (of Kimi K3) is not supported")
    require_only(raw, mla_use_nope=True, hidden_act="silu", moe_router_activation_func="sigmoid")
    raw = {**KIMI_DEFAULTS, **raw, **usual_keys(raw, KIMI_KEYS), **usual_keys(own, KIMI_PARTS)}
    attending = own.get("full_attn_layers", range(5, count(raw) + 1, 4))  # the first layer is 1
    heads, size, eps = int(raw["linear_num_heads"]), int(raw["linear_head_dim"]), norm_eps(raw)
    delta = KimiDeltaSpec(heads, heads, size, size, int(raw["linear_conv_kernel_dim"]), eps, rank=size)
    still = [replace(one, rotation=HeadRotation(NO_ROTATION, one.rotated)) for one in latent_attentions(raw)]
    mixers = mixed(raw, delta, still, lambda layer: layer + 1 in attending)
    return decoder(raw, mixers, experts(raw, correction="e_score_correction_bias"))


def mistral4(raw: Raw) -> ModelSpec:
    """Mistral 4: experts are chosen by a softmax, and queries grow with the position."""
    raw = {"n_shared_experts": 1, "norm_topk_prob": True, **raw}
    return decoder(raw, latent_attentions(raw), experts(raw, routing={"group_best": 2}))


def glm4_moe_lite(raw: Raw) -> ModelSpec:
    """GLM-4.7-Flash: the first layer is dense, unless the file says which."""
    return deepseek_v3({"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **raw})


def minicpm3(raw: Raw) -> ModelSpec:
    """MiniCPM3: no experts, and halves of a head rotate together."""
    size = int(raw["hidden_size"]) // int(raw["num_attention_heads"])
    raw = {"rms_norm_eps": 1e-5, "rope_interleave": False, "v_head_dim": size, **MINICPM3, **raw}
    return _minicpm(raw, latent_attentions(raw))


MINICPM3: Raw = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
"""What files may leave out."""


def minicpm(raw: Raw) -> ModelSpec:
    """MiniCPM 1, 2 and 4: Llama with multipliers. MiniCPM 4.1 chooses keys in blocks if a file says so."""
    require(not raw.get("sparse_config"), "sparse_config (attention to chosen blocks) is not supported")
    require(not raw.get("num_experts"), "MiniCPM with experts is not supported")
    return _minicpm(raw, attentions(raw))


def _minicpm(raw: Raw, mixers: Sequence[MixerSpec]) -> ModelSpec:
    """A decoder with multipliers as in Granite."""
    raw = {"tie_word_embeddings": True, **raw}
    return decoder(
        raw,
        mixers,
        dense(raw),
        embedding=EmbeddingSpec(float(raw.get("scale_emb", 1))),
        residual=float(raw.get("scale_depth", 1)) * count(raw) ** -0.5,
        logit_scale=int(raw.get("dim_model_base", 1)) / int(raw["hidden_size"]),
    )
