"""How the `rope_scaling` or `rope_parameters` of a `config.json` become a `RopeConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.config import RopeConfig
from soothsay.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")

ALIASES = {"su": "longrope", "mrope": "default", "dynamic": "default"}
"""Kinds that compute what another one computes.

su: longrope's older name. mrope: text has the same position in all three axes. dynamic: transformers changes
the base as soon as a request is longer than `max_position_embeddings`, so keys would depend on later tokens.
Up to there, nothing is scaled, and there the context ends."""


def parse_rope(
    scaling: Mapping[str, Any], theta: float, positions: int, original: int, dims: int
) -> RopeConfig:
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
    return RopeConfig(
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
