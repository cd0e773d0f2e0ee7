"""A decoder of parts, by the fields of a `config.json` that all families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.layer_fields import Raw, Windows, scaled_context
from soothsay.model.families.part_fields import attentions, dense, norm_eps
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)
from soothsay.model.specs.rope_spec import HeadRotation


def decoder(
    raw: Raw,
    mixers: Sequence[MixerSpec | None],
    mlps: Sequence[MLPSpec | None],
    *,
    embedding: EmbeddingSpec | None = None,
    logit_scale: float | None = None,
    residual: float = 1.0,
    max_positions: int | None = None,
    centred_norms: bool = False,
    zero_centred_norms: bool = False,
    **layer: Any,
) -> ModelSpec:
    """A decoder of these parts.

    Args:
        raw: the file.
        mixers: of each layer.
        mlps: of each layer.
        embedding: the table; None: it is not scaled.
        logit_scale: factor of logits; None: the file's.
        residual: the factor of what layers add to the stream.
        max_positions: the context; None: by the file and its rotary positions.
        centred_norms: norms subtract the mean first.
        zero_centred_norms: a norm's weight w is stored as w - 1.
        layer: fields of all layers in which they differ from Llama's.

    Raises `ModelError`.
    """
    eps = norm_eps(raw)
    # the stream is divided by the factor, and its mean square by the square
    norm = NormSpec(eps / residual**2, centred_norms)
    layers = tuple(LayerSpec(*parts, norm, **layer) for parts in zip(mixers, mlps, strict=True))
    spec = ModelSpec(
        family=str(raw["model_type"]),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        layers=layers,
        max_positions=max_positions or 0,
        norm=NormSpec(eps, centred_norms),
        embedding=embedding or EmbeddingSpec(),
        head=HeadSpec(
            bool(raw.get("tie_word_embeddings", False)),
            float(raw.get("logit_scale", 1.0)) if logit_scale is None else logit_scale,
            raw.get("final_logit_softcapping"),
        ),
        residual_multiplier=residual,
        zero_centred_norms=zero_centred_norms,
    )
    if raw.get("use_qk_norm") and not any(own.norms for own in spec.parts(AttentionSpec).values()):
        raise ModelError("config.json: use_qk_norm (as in Command R+) is not supported; take another model")
    return replace(spec, max_positions=max_positions or scaled_context(raw, spec.rotation.rope))


def llama_like(
    raw: Raw,
    windowed: Windows | None = None,
    rotated: Sequence[HeadRotation] | None = None,
    mlps: Sequence[MLPSpec] | None = None,
    **own: Any,
) -> ModelSpec:
    """A decoder as Llama. `own`: fields of attention in which the family differs."""
    return decoder(raw, attentions(raw, windowed, rotated, **own), dense(raw) if mlps is None else mlps)
