"""Gemma 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, all_but_each, even, rotations, scaled_context, windows
from soothsay.model.families.part_fields import attentions, dense, head_norms
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import EmbeddingSpec, ModelSpec

GEMMA3_DEFAULTS = {  # Google's multimodal checkpoints leave out what equals transformers' defaults
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def gemma2(raw: Raw) -> ModelSpec:
    """Every other layer has a window."""
    return _gemma(raw, attentions(raw, windows(raw, even)))


def gemma3(raw: Raw) -> ModelSpec:
    """Layers with a window rotate by a base of their own, without scaling."""
    raw = {**GEMMA3_DEFAULTS, **raw}
    windowed = windows(raw, partial(all_but_each, 6))
    rotated = rotations(raw, local=windowed)
    rope = next((own.rope for own, window in zip(rotated, windowed, strict=True) if window is None), None)
    context = None if rope is None else scaled_context(raw, rope, states_scaled=True)
    return _gemma(raw, attentions(raw, windowed, rotated, norms=head_norms(raw)), context)


def _gemma(raw: Raw, mixers: Sequence[AttentionSpec], max_positions: int | None = None) -> ModelSpec:
    raw = gemma_keys(raw)
    return decoder(
        raw,
        mixers,
        dense(raw),
        embedding=scaled_embedding(raw),
        max_positions=max_positions,
        post_norms=True,
        zero_centred_norms=True,
    )


def gemma_keys(raw: Raw) -> Raw:
    """The file with the usual keys, and with what all of Gemma's files may leave out."""
    kind = raw.get("hidden_activation", "gelu_pytorch_tanh")
    return {"tie_word_embeddings": True, **raw, "hidden_act": kind}


def scaled_embedding(raw: Raw) -> EmbeddingSpec:
    """Embeddings are multiplied by the square root of the hidden size."""
    return EmbeddingSpec(int(raw["hidden_size"]) ** 0.5, scale_rounded=True)
