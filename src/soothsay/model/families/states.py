"""The layers that keep a state instead of keys and values, in a `config.json`."""

from __future__ import annotations

from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.layers import Raw
from soothsay.states_config import ConvolutionConfig, DeltaConfig, StateSpaceConfig


def parse_delta(raw: Raw, layers: int) -> DeltaConfig | None:
    """The layers with a gated delta rule; None: no layer has it. Raises `ModelError`."""
    recurrent = _layers_of("linear_attention", raw, layers)
    key_heads, value_heads = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
    if value_heads % key_heads:
        raise ModelError(
            f"config.json: {value_heads} linear_num_value_heads cannot share {key_heads} "
            "linear_num_key_heads evenly"
        )
    if not recurrent:
        return None
    return DeltaConfig(
        layers=recurrent,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=int(raw["linear_key_head_dim"]),
        value_size=int(raw["linear_value_head_dim"]),
        taps=int(raw["linear_conv_kernel_dim"]),
        tiled=bool(raw.get("linear_heads_tiled", False)),
    )


def parse_convolution(raw: Raw, layers: int) -> ConvolutionConfig | None:
    """The layers with a short convolution; None: no layer has it. Raises `ModelError`."""
    found = _layers_of("conv", raw, layers)
    return ConvolutionConfig(found, int(raw["hidden_size"]), int(raw["conv_L_cache"])) if found else None


def parse_state_space(raw: Raw, layers: int) -> StateSpaceConfig | None:
    """The layers of Mamba-2; None: no layer is. Raises `ModelError`."""
    found = _layers_of("linear_attention", raw, layers)
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
    if not found:
        return None
    return StateSpaceConfig(
        layers=found,
        heads=heads,
        head_size=size // heads,
        groups=groups,
        state_size=int(raw["mamba_d_state"]),
        taps=int(raw["mamba_d_conv"]),
    )


def _is_limited(limit: Any) -> bool:
    """Whether steps have other bounds than 0 and infinity, which transformers writes as an object."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return limit is not None
    least, most = limit
    return least != 0 or not (most == {"__float__": "Infinity"} or (isinstance(most, float) and most >= 1e30))


def _layers_of(wanted: str, raw: Raw, layers: int) -> tuple[int, ...]:
    """The layers of a type. All others should have full attention."""
    kinds = raw["layer_types"]
    if len(kinds) != layers or not set(kinds) <= {wanted, "full_attention"}:
        raise ModelError(
            f"config.json: layer_types should be {wanted} or full_attention for each of {layers} "
            f"layers; it has {len(kinds)} entries: {', '.join(sorted(set(kinds)))}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == wanted)
