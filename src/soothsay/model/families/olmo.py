"""OLMo 2 and 3, and EXAONE 4: norms stand after each part only, and heads are normed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw, Windows, all_but_each, count, rotations, windows
from soothsay.model.families.part_fields import attentions, dense, head_norms
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.specs.rope_spec import HeadRotation


def olmo2(raw: Raw) -> ModelSpec:
    """All queries are normed together, and all keys."""
    raw = {"rms_norm_eps": 1e-5, **raw}
    return _normed_after(raw, windows(raw), rotations(raw), over_heads=True)


def olmo3(raw: Raw) -> ModelSpec:
    """OLMo 2 with windows, whose layers rotate without scaling."""
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, **raw}
    windowed = windows(raw, partial(all_but_each, 4))
    return _normed_after(raw, windowed, rotations(raw, local=windowed), over_heads=True)


def exaone4(raw: Raw) -> ModelSpec:
    """Layers without a window do not rotate, where others have one. A text such as LLLG may list them."""
    raw = {"rms_norm_eps": 1e-5, **raw}
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise ModelError(f"config.json: sliding_window_pattern is {pattern!r:.40}, not letters L and G")
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        listed = [kinds[pattern[i % len(pattern)]] for i in range(count(raw))]
        raw = {"layer_types": listed, **raw, "sliding_window_pattern": None}
    windowed = windows(raw, partial(all_but_each, 4))
    unrotated = [window is None and any(windowed) for window in windowed]
    return _normed_after(raw, windowed, rotations(raw, unrotated=unrotated))


def _normed_after(raw: Raw, windowed: Windows, rotated: Sequence[HeadRotation], **norms: bool) -> ModelSpec:
    mixers = attentions(raw, windowed, rotated, norms=head_norms(raw, **norms))
    return decoder(raw, mixers, dense(raw), pre_norms=False, post_norms=True)
