"""Specs of the parts that keep a state, from the fields of a `config.json`. All raise `ModelError`."""

from __future__ import annotations

from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.layer_choices import Raw
from soothsay.model.specs.state_specs import DeltaSpec, StateSpaceSpec


def delta(raw: Raw, norm_eps: float, by_key_head: tuple[str, ...]) -> DeltaSpec:
    """A gated delta rule."""
    key_heads, value_heads = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
    if value_heads % key_heads:
        raise ModelError(
            f"config.json: {value_heads} linear_num_value_heads cannot share {key_heads} "
            "linear_num_key_heads evenly"
        )
    return DeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=int(raw["linear_key_head_dim"]),
        value_size=int(raw["linear_value_head_dim"]),
        taps=int(raw["linear_conv_kernel_dim"]),
        norm_eps=norm_eps,
        tiled=bool(raw.get("linear_heads_tiled", False)),
        by_key_head=by_key_head,
    )


def state_space(raw: Raw, norm_eps: float) -> StateSpaceSpec:
    """Mamba-2."""
    heads, groups = int(raw["mamba_n_heads"]), int(raw["mamba_n_groups"])
    size = int(raw.get("mamba_d_ssm") or int(raw["mamba_expand"]) * int(raw["hidden_size"]))
    if size % heads or heads % groups:
        raise ModelError(
            f"config.json: {heads} mamba_n_heads, in {groups} mamba_n_groups, cannot share {size} evenly"
        )
    if raw.get("mamba_d_head", "auto") not in ("auto", size // heads):
        raise ModelError(
            f"config.json: mamba_d_head is {raw['mamba_d_head']!r:.40}, and {heads} heads share {size}"
        )
    if not raw.get("mamba_conv_bias", True) or raw.get("mamba_proj_bias"):
        raise ModelError(
            "config.json: mamba_conv_bias is supported only as true, and mamba_proj_bias as false"
        )
    if _is_limited(raw.get("time_step_limit")):
        raise ModelError("config.json: time_step_limit is supported only as 0 to infinity")
    return StateSpaceSpec(
        heads=heads,
        head_size=size // heads,
        groups=groups,
        state_size=int(raw["mamba_d_state"]),
        taps=int(raw["mamba_d_conv"]),
        norm_eps=norm_eps,
    )


def _is_limited(limit: Any) -> bool:
    """Whether steps have other bounds than 0 and infinity, which transformers writes as an object."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return limit is not None
    least, most = limit
    return least != 0 or not (most == {"__float__": "Infinity"} or (isinstance(most, float) and most >= 1e30))
