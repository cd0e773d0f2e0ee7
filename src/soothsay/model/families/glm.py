"""GLM-4 to GLM-4.7, but for those with latent attention."""

from __future__ import annotations

from typing import Any

from soothsay.model.families.decoder import decoder, llama_like
from soothsay.model.families.layer_fields import Raw, rotations
from soothsay.model.families.part_fields import attentions, dense, experts, head_norms
from soothsay.model.specs.model_spec import ModelSpec


def glm(raw: Raw, **layer: Any) -> ModelSpec:
    """Half of each head rotates, by pairs of neighbours."""
    raw = {"attention_bias": True, "rms_norm_eps": 1.5625e-7, **raw}
    rotated = rotations(raw, share=0.5, neighbours=True)
    return decoder(raw, attentions(raw, rotated=rotated, o_bias=False), dense(raw), **layer)


def glm4(raw: Raw) -> ModelSpec:
    """Norms stand after each part too."""
    return glm(raw, post_norms=True)


def glm4_moe(raw: Raw) -> ModelSpec:
    """GLM-4.5: experts as in DeepSeek-V3. Heads are normed if the file says so."""
    defaults = {"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True}
    raw = {"rms_norm_eps": 1e-5, **defaults, **raw}
    norms = head_norms(raw) if raw.get("use_qk_norm") else None
    mlps = experts(raw, correction="e_score_correction_bias")
    return llama_like(raw, None, rotations(raw, share=0.5), mlps, norms=norms, o_bias=False)
