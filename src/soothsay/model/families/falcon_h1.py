"""How a Falcon-H1 `config.json` becomes a `ModelConfig`.

Multipliers (muP; Yang et al. 2022, arXiv 2203.03466) that multiply the same number become one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soothsay.config import ModelConfig
from soothsay.errors import ModelError

DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""What files may leave out, as transformers has it."""

BIASES = ("attention_bias", "mlp_bias", "projectors_bias")


def rewritten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a type for each layer: all have Mamba-2. Raises `ModelError` for biases."""
    if biased := [name for name in BIASES if raw.get(name)]:
        raise ModelError(f"config.json: {biased[0]} is supported only as false")
    return {**raw, "layer_types": ["linear_attention"] * int(raw["num_hidden_layers"])}


def finished(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The configuration with the fields that only Falcon-H1 has. Raises `ModelError`."""

    def number(name: str) -> float:
        return float(raw.get(f"{name}_multiplier", 1.0))

    def numbers(name: str, count: int) -> tuple[float, ...]:
        values = raw.get(f"{name}_multipliers", [1.0] * count)
        if len(values) != count:
            raise ModelError(f"config.json: {name}_multipliers has {len(values)} entries, and not {count}")
        return tuple(map(float, values))

    assert config.state_space is not None
    inputs, (gates, outputs) = number("attention_in"), numbers("mlp", 2)
    own = tuple(number("ssm_in") * part for part in numbers("ssm", 5))
    state_space = replace(
        config.state_space,
        normed=bool(raw.get("mamba_rms_norm", False)),
        norm_first=bool(raw.get("mamba_norm_before_gate", True)),
        multipliers=() if set(own) == {1.0} else own,
        beside=(number("ssm_out"), inputs * number("attention_out")),  # inputs: of the values
    )
    return replace(
        config,
        state_space=state_space,
        embedding_scale=number("embedding"),
        attention_scale=config.attention_scale * inputs**2 * number("key"),
        mlp_multipliers=None if gates == outputs == 1.0 else (gates, outputs),
        logit_scale=number("lm_head"),
    )
