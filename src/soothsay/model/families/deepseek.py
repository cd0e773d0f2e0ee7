"""Latent attention: DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and MiniCPM3."""

from soothsay.model.families.decoder import decoder, dense, experts, latent_attentions
from soothsay.model.families.fields import require
from soothsay.model.families.layer_fields import Raw, count
from soothsay.model.specs.model_spec import EmbeddingSpec, ModelSpec


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
    """GLM-4.7-Flash: the first layer is dense, unless the file says which."""
    return deepseek_v3({"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **raw})


def minicpm3(raw: Raw) -> ModelSpec:
    """MiniCPM3: no experts, multipliers as in Granite, and halves of a head rotate together."""
    hidden, layers = int(raw["hidden_size"]), count(raw)
    own = {"v_head_dim": hidden // int(raw["num_attention_heads"]), "rms_norm_eps": 1e-5}
    raw = {"tie_word_embeddings": True, "rope_interleave": False, **own, **raw}
    return decoder(
        raw,
        latent_attentions(raw),
        dense(raw),
        embedding=EmbeddingSpec(float(raw.get("scale_emb", 12))),
        residual=float(raw.get("scale_depth", 1.4)) * layers**-0.5,
        logit_scale=int(raw.get("dim_model_base", 256)) / hidden,
    )
