"""LFM2 and LFM2-MoE: most layers read the last tokens by a short convolution."""

from __future__ import annotations

from collections.abc import Sequence

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, are, count
from soothsay.model.families.part_fields import attentions, dense, experts, head_norms
from soothsay.model.specs.model_spec import MLPSpec, ModelSpec
from soothsay.model.specs.state_specs import ConvolutionSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "conv_L_cache": 3,
    "rope_theta": 1e6,
}
EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
}


def lfm2(raw: Raw) -> ModelSpec:
    """The size of feed-forward parts may be derived."""
    size = int(raw.get("block_ff_dim") or raw["intermediate_size"])
    if raw.get("block_auto_adjust_ff_dim", True):
        step = int(raw.get("block_multiple_of") or 256)
        size = int(float(raw.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        size = -(-size // step) * step
    raw = {**raw, "intermediate_size": size}
    return _convolutions(raw, dense(raw))


def lfm2_moe(raw: Raw) -> ModelSpec:
    """`num_dense_layers` takes the place of `first_k_dense_replace`."""
    raw = {**EXPERTS, **raw, "first_k_dense_replace": int(raw.get("num_dense_layers", 2))}
    return _convolutions(raw, experts(raw, correction="expert_bias"))


def _convolutions(raw: Raw, mlps: Sequence[MLPSpec]) -> ModelSpec:
    if raw.get("conv_bias"):
        raise ModelError("config.json: conv_bias (convolutions with a bias) is not supported")
    full = raw.get("full_attn_idxs")
    kinds = ["full_attention" if full is None or i in full else "conv" for i in range(count(raw))]
    raw = {
        **DEFAULTS,
        **raw,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "layer_types": raw.get("layer_types") or kinds,
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
    }
    own = ConvolutionSpec(int(raw["hidden_size"]), int(raw["conv_L_cache"]))
    read = attentions(raw, norms=head_norms(raw))
    mixers = [own if kept else other for kept, other in zip(are("conv", raw), read, strict=True)]
    return decoder(raw, mixers, mlps)
