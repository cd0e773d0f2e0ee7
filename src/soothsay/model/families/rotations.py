"""How heads rotate, by a `config.json`: its `rope_scaling` or `rope_parameters`, its bases and shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_POSITIONS
from soothsay.model.families.layer_choices import Raw, Windows, count
from soothsay.model.specs.rope_spec import NO_ROTATION, HeadRotation, RopeSpec

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")

ALIASES = {"su": "longrope", "mrope": "default", "dynamic": "default"}
"""Kinds that compute what another one computes.

su: longrope's older name. mrope: text has the same position in all three axes. dynamic: transformers changes
the base as soon as a request is longer than `max_position_embeddings`, so keys would depend on later tokens.
Up to there, nothing is scaled, and there the context ends."""


def rotations(
    raw: Raw,
    size: int,
    *,
    share: float | None = None,
    neighbours: bool = False,
    local: Windows = (),
    unrotated: Sequence[bool] = (),
) -> list[HeadRotation]:
    """How the heads of each layer rotate.

    Args:
        raw: the file.
        size: dimensions of a head.
        share: the share of them that rotates, where the file does not say so; None: all, whatever it says.
        neighbours: stored heads rotate by pairs of neighbours.
        local: windows of all layers: those with a window rotate by a rotary embedding of their own.
        unrotated: for each layer, whether it does not rotate; empty: all do.
    """
    rotated = None if share is None else rotated_dimensions(raw, size, share)
    first = main_rope(raw, rotated or size)
    second = _rope(raw, rotated or size, is_local=True) if local else NO_ROTATION
    chosen = [window is not None for window in local] or unrotated or [False] * count(raw)
    return [HeadRotation(second if other else first, size, rotated, neighbours) for other in chosen]


def rotated_dimensions(raw: Raw, size: int, share: float) -> int | None:
    """Dimensions of a head that rotate; None: all. `share` of them, where the file does not say so."""
    share = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", share)
    rotated = int(size * raw.get("partial_rotary_factor", share))
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"config.json: by its partial_rotary_factor, {rotated} of {size} dimensions of each head rotate; "
            "the number must be even"
        )
    return None if rotated == size else rotated


def main_rope(raw: Raw, dims: int) -> RopeSpec:
    """The rotary embedding of most layers, which turns `dims` dimensions of a head."""
    return _rope(raw, dims, is_local=False)


def _rope(raw: Raw, dims: int, *, is_local: bool) -> RopeSpec:
    """The rotary embedding of most layers, or of those with a window."""
    positions = int(raw["max_position_embeddings"])
    original = int(raw.get("original_max_position_embeddings") or positions)
    theta = float(raw.get("rope_theta") or 1e4)
    scaling: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "full_attention" in scaling:  # transformers 5 writes one mapping for each kind of layer
        scaling = scaling["sliding_attention" if is_local else "full_attention"]
    elif is_local:
        scaling = {}
    if is_local:
        theta = float(raw.get("rope_local_base_freq") or theta)
    return parse_rope(scaling, theta, positions, original, dims)


def scaled_context(raw: Raw, rope: RopeSpec, *, states_scaled: bool = False) -> int:
    """The context after scaling. A file with llama3 scaling states the scaled context already.

    `states_scaled`: so does one with linear scaling.
    """
    positions = int(raw["max_position_embeddings"])
    if rope.kind == "yarn":
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    elif rope.kind == "linear" and not states_scaled:
        positions = int(positions * rope.factor)
    if not 1 <= positions <= MAX_POSITIONS:
        raise ModelError(
            f"config.json: a context of {positions:,} tokens, scaled by {rope.factor:g}, is not possible"
        )
    return positions


def parse_rope(
    scaling: Mapping[str, Any], theta: float, positions: int, original: int, dims: int
) -> RopeSpec:
    """Parse a mapping of checked fields.

    Args:
        scaling: the mapping. Without a type, nothing is scaled.
        theta: the base, where `scaling` has none.
        positions: the model's context.
        original: the context of the first training, where `scaling` has none.
        dims: dimensions of a head that rotate.

    Raises `ModelError` for an unknown type, and for numbers that do not fit each other.
    """
    name = scaling.get("rope_type", scaling.get("type", "default"))
    kind = ALIASES.get(name, name)
    if kind not in KINDS:
        known = ", ".join((*KINDS, *ALIASES))
        raise ModelError(f"rope_scaling type {kind!r} is not supported; known types: {known}")
    if kind not in ("default", "longrope", "proportional") and scaling.get("factor") is None:
        raise ModelError(f"rope_scaling of type {kind!r} has no 'factor' in config.json")

    def number(key: str, default: float) -> float:
        value = scaling.get(key)
        return default if value is None else float(value)

    attention_factor = scaling.get("attention_factor")
    if number("high_freq_factor", 4.0) < number("low_freq_factor", 1.0):
        raise ModelError("config.json: high_freq_factor must not be below low_freq_factor")
    original = int(scaling.get("original_max_position_embeddings") or original)
    return RopeSpec(
        theta=number("rope_theta", theta),
        kind=kind,
        factor=number("factor", positions / original if kind == "longrope" else 1.0),
        original_max_positions=original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=bool(scaling.get("truncate", True)),
        share=number("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0,
        **(_longrope(scaling, positions, original, dims) if kind == "longrope" else {}),
    )


def _longrope(scaling: Mapping[str, Any], positions: int, original: int, dims: int) -> dict[str, Any]:
    """The fields that only longrope has."""
    if original < 2:
        raise ModelError(
            f"config.json: longrope with a context of {original} tokens before scaling is not possible"
        )
    factors = {}
    for ours, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        given = tuple(float(value) for value in scaling.get(key) or ())
        if len(given) != dims // 2:
            raise ModelError(
                f"config.json: {key!r} of longrope has {len(given)} values, and {dims // 2} pairs of "
                "dimensions rotate"
            )
        factors[ours] = given
    return {**factors, "context": positions}
