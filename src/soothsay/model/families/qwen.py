"""Qwen2 to Qwen3.5."""

from soothsay.model.families.decoder import (
    attentions,
    decoder,
    delta,
    dense,
    experts,
    head_norms,
    llama_like,
)
from soothsay.model.families.layer_fields import Raw, every, last, mixed, no_layer, rotations, windows
from soothsay.model.specs.model_spec import ModelSpec

HYBRID_DEFAULTS = {  # which files may leave out, as those of transformers do
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def qwen2(raw: Raw) -> ModelSpec:
    """Queries, keys and values have a bias whatever the file says, and attention's output has none."""
    return llama_like(raw, windows(raw, last, has_switch=True), bias=True, o_bias=False)


def qwen2_vl(raw: Raw) -> ModelSpec:
    """Older files of these have no `text_config`."""
    return qwen2({"rope_theta": 1e6, "max_window_layers": 80, **raw})


def qwen3(raw: Raw) -> ModelSpec:
    """Heads are normed."""
    return llama_like(raw, windows(raw, last, has_switch=True), norms=head_norms(raw))


def qwen3_vl_text(raw: Raw) -> ModelSpec:
    """The text part of Qwen3-VL."""
    raw = {"rope_theta": 5e5, **raw}
    return llama_like(raw, norms=head_norms(raw))


def qwen2_moe(raw: Raw) -> ModelSpec:
    """Qwen1.5 and Qwen2 with experts, beside a gated part that all rows run through."""
    raw = {"shared_expert_intermediate_size": 5632, "moe_intermediate_size": 1408, **raw}
    shared = int(raw["shared_expert_intermediate_size"])
    windowed = windows(raw, last, has_switch=True)
    mlps = experts(raw, shared_size=shared, shared_gate=True)
    return llama_like(raw, windowed, mlps=mlps, bias=bool(raw.get("qkv_bias", True)), o_bias=False)


def qwen3_moe(raw: Raw) -> ModelSpec:
    """Qwen3 with experts."""
    windowed = windows(raw, every, reads_types=False, has_switch=True)
    return llama_like(raw, windowed, mlps=experts(raw), norms=head_norms(raw))


def qwen3_vl_moe_text(raw: Raw) -> ModelSpec:
    """The text part of Qwen3-VL with experts."""
    raw = {"rope_theta": 5e5, **raw}
    windowed = windows(raw, no_layer, reads_types=False)
    return llama_like(raw, windowed, mlps=experts(raw), norms=head_norms(raw))


def qwen3_next(raw: Raw) -> ModelSpec:
    """The rows of the delta rule's products stand key head by key head."""
    return _hybrid({**HYBRID_DEFAULTS, **raw}, has_experts=True, by_key_head=("qkvz", "gates"))


def qwen3_next_gguf(raw: Raw) -> ModelSpec:
    """Our own name of llama.cpp's files: queries, keys, values and gates are matrices of their own."""
    return _hybrid({**HYBRID_DEFAULTS, **raw}, has_experts=True, by_key_head=("gates",))


def qwen3_5(raw: Raw) -> ModelSpec:
    """Qwen3-Next without experts."""
    return _hybrid({**HYBRID_DEFAULTS, **raw}, has_experts=False)


def qwen3_5_moe(raw: Raw) -> ModelSpec:
    """No layer is dense."""
    raw = {**HYBRID_DEFAULTS, "intermediate_size": 512, **raw, "norm_topk_prob": True}
    return _hybrid(raw, has_experts=True)


def _hybrid(raw: Raw, *, has_experts: bool, by_key_head: tuple[str, ...] = ()) -> ModelSpec:
    """Most layers have a delta rule, the others gated attention. Norms are stored around 0."""
    interval = int(raw.get("full_attention_interval") or 4)
    rotated = rotations(raw, share=0.25)
    attention = attentions(raw, rotated=rotated, norms=head_norms(raw), gated=True)
    rule = delta(raw, by_key_head)
    mixers = mixed(raw, rule, attention, lambda layer: (layer + 1) % interval == 0)
    shared = int(raw["shared_expert_intermediate_size"]) if has_experts else 0
    mlps = experts(raw, shared_size=shared, shared_gate=True) if has_experts else dense(raw)
    return decoder(raw, mixers, mlps, zero_centred_norms=True)
