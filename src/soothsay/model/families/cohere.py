"""Command R and R7B, and Aya."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, Windows, all_but_each, rotations, windows
from soothsay.model.families.part_fields import attentions, dense
from soothsay.model.specs.model_spec import ModelSpec


def cohere(raw: Raw) -> ModelSpec:
    """Attention and the feed-forward part read the same stream, whose mean is subtracted."""
    return _cohere(raw, windows(raw), unrotated=())


def cohere2(raw: Raw) -> ModelSpec:
    """Layers without a window do not rotate."""
    windowed = windows(raw, partial(all_but_each, 4))
    return _cohere(raw, windowed, unrotated=[window is None for window in windowed])


def _cohere(raw: Raw, windowed: Windows, unrotated: Sequence[bool]) -> ModelSpec:
    defaults = {"tie_word_embeddings": True, "logit_scale": 0.0625}
    raw = {**defaults, **raw, "rms_norm_eps": raw.get("layer_norm_eps", 1e-5)}
    rotated = rotations(raw, neighbours=True, unrotated=unrotated)
    return decoder(raw, attentions(raw, windowed, rotated), dense(raw), parallel=True, centred_norms=True)
