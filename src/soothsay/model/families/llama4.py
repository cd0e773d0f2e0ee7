"""Llama 4."""

from __future__ import annotations

from dataclasses import replace

from soothsay.model.families.decoder import decoder
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
from soothsay.model.families.part_fields import attentions, experts, head_norms, query_growth
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec

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
