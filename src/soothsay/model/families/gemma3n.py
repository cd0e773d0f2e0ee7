"""Gemma 3n."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.gemma import gemma_keys, scaled_embedding
from soothsay.model.families.gemma4 import sharing
from soothsay.model.families.layer_fields import Raw, all_but_each, count, rotations, windows
from soothsay.model.families.part_fields import attentions, dense, head_norms
from soothsay.model.specs.model_spec import AlternatingSpec, LayerEmbeddingsSpec, LayerInputSpec, ModelSpec

DEFAULTS: Raw = {
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 1,  # scores are not scaled
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
"""What published files leave out, since it equals transformers' defaults."""


def gemma3n(raw: Raw) -> ModelSpec:
    """The stream has several parts, and the last layers read keys and values of layers before them."""
    if raw.get("altup_active_idx", 0) != 0:
        raise ModelError("config.json: altup_active_idx is supported only as 0")
    raw = gemma_keys({**DEFAULTS, **raw})
    layers, size = count(raw), int(raw["hidden_size_per_layer_input"])
    windowed = windows(raw, partial(all_but_each, 5))
    rotated = rotations(raw, local=windowed)
    mixers = attentions(raw, windowed, rotated, norms=head_norms(raw, values=True))
    sparsity = raw.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    if len(sparsity) != layers:
        raise ModelError(
            f"config.json: activation_sparsity_pattern has {len(sparsity)} entries for {layers} layers"
        )
    parts = dense(raw)
    own = LayerEmbeddingsSpec(size, int(raw["vocab_size_per_layer_input"]))
    return decoder(
        raw,
        sharing(raw, mixers),
        [replace(part, sparsity=float(share)) for part, share in zip(parts, sparsity, strict=True)],
        embedding=replace(scaled_embedding(raw), layers=own),
        post_norms=True,
        input=LayerInputSpec(size, parts[0].activation),
        alternating=AlternatingSpec(
            parts=int(raw.get("altup_num_inputs", 4)),
            scaled=bool(raw.get("altup_correct_scale", True)),
            laurel_rank=int(raw.get("laurel_rank", 64)),
        ),
    )
