"""Specs of attention, from the fields of a `config.json`. All raise `ModelError`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.layer_choices import Raw, Windows, windows
from soothsay.model.families.rotations import main_rope, rotations
from soothsay.model.specs.attention_spec import AttentionSpec, HeadNorms, LatentSpec
from soothsay.model.specs.rope_spec import HeadRotation, QueryGrowthSpec

MAX_SPANS = 2**12
"""Limit of the original contexts in a context, for queries that grow with each of them."""


def norm_eps(raw: Raw) -> float:
    """The number that norms add to the mean square."""
    return float(raw.get("rms_norm_eps", 1e-6))


def head_norms(raw: Raw, **own: bool) -> HeadNorms:
    """Norms of queries and keys. `own`: fields in which a family differs."""
    return HeadNorms(norm_eps(raw), **own)


def heads_of(raw: Raw) -> tuple[int, int, int]:
    """The heads of queries, those of keys and values, and the size of a head."""
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if "head_dim" not in raw and hidden % heads:
        raise ModelError(f"config.json: {heads} attention heads do not divide hidden_size {hidden}")
    size = int(raw.get("head_dim") or hidden // heads)
    if size % 2:
        raise ModelError(f"config.json: heads of {size} dimensions cannot be rotated; head_dim must be even")
    return heads, kv_heads, size


def attentions(
    raw: Raw, windowed: Windows | None = None, rotated: Sequence[HeadRotation] | None = None, **own: Any
) -> list[AttentionSpec]:
    """The attention of each layer.

    Args:
        raw: the file.
        windowed: the window of each layer; None: as `layer_types` have it.
        rotated: how the heads of each layer rotate; None: whole heads, in all layers alike.
        own: fields in which a family's layers differ from Llama's.
    """
    heads, kv_heads, size = heads_of(raw)
    windowed = windows(raw) if windowed is None else windowed
    rotated = rotations(raw, size) if rotated is None else rotated
    bias = bool(raw.get("attention_bias", False))
    usual = {
        "scale": float(raw.get("query_pre_attn_scalar") or size) ** -0.5,
        "softcap": raw.get("attn_logit_softcapping"),
        "bias": bias,
        "o_bias": bias,
    }
    pairs = zip(windowed, rotated, strict=True)
    return [
        AttentionSpec(heads, kv_heads, rotation, window=window, **{**usual, **own})
        for window, rotation in pairs
    ]


def latent_attentions(raw: Raw) -> list[LatentSpec]:
    """The latent attention of each layer."""
    heads, _, size = heads_of({**raw, "num_key_value_heads": 1, "head_dim": raw["qk_rope_head_dim"]})
    rope, query_rank = main_rope(raw, size), raw.get("q_lora_rank")
    sharpened = 1.0  # YaRN sharpens all dimensions, those that do not rotate too
    if rope.factor > 1 and rope.mscale_all_dim:
        sharpened = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    plain, bias = int(raw["qk_nope_head_dim"]), bool(raw.get("attention_bias", False))
    every = LatentSpec(
        heads=heads,
        rank=int(raw["kv_lora_rank"]),
        rotation=HeadRotation(rope, size, neighbours=bool(raw.get("rope_interleave", True))),
        plain=plain,
        value=int(raw["v_head_dim"]),
        scale=(plain + size) ** -0.5 * sharpened**2,
        query_rank=None if query_rank is None else int(query_rank),
        softcap=raw.get("attn_logit_softcapping"),
        bias=bias,
        o_bias=bias,
    )
    return [replace(every, window=window) for window in windows(raw)]


def query_growth(beta: float, span: int, max_positions: int, name: str, shift: int = 0) -> QueryGrowthSpec:
    """Queries that grow with the position, each `span` positions. `name` is the key of the span."""
    if max_positions > MAX_SPANS * span:
        raise ModelError(f"config.json: {name} {span} is too small for its context")
    return QueryGrowthSpec(float(beta), span, max_positions, shift)
