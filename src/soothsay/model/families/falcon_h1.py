"""Falcon-H1.

Multipliers (muP; Yang et al. 2022, arXiv 2203.03466) that multiply the same number become one.
"""

from __future__ import annotations

from dataclasses import replace

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.layer_fields import Raw
from soothsay.model.families.part_fields import attentions, dense, norm_eps, state_space
from soothsay.model.specs.model_spec import EmbeddingSpec, ModelSpec
from soothsay.model.specs.state_specs import BesideStatesSpec

DEFAULTS: Raw = {
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""What files may leave out, as transformers has it."""

BIASES = ("attention_bias", "mlp_bias", "projectors_bias")


def falcon_h1(raw: Raw) -> ModelSpec:
    """All layers have Mamba-2 beside attention."""
    if biased := [name for name in BIASES if raw.get(name)]:
        raise ModelError(f"config.json: {biased[0]} is supported only as false")
    raw = {**DEFAULTS, **raw}

    def number(name: str) -> float:
        return float(raw.get(f"{name}_multiplier", 1.0))

    def numbers(name: str, count: int) -> tuple[float, ...]:
        values = raw.get(f"{name}_multipliers", [1.0] * count)
        if len(values) != count:
            raise ModelError(f"config.json: {name}_multipliers has {len(values)} entries, and not {count}")
        return tuple(map(float, values))

    inputs, (gates, outputs) = number("attention_in"), numbers("mlp", 2)
    own = tuple(number("ssm_in") * part for part in numbers("ssm", 5))
    states = replace(
        state_space(raw, norm_eps(raw)),
        normed=bool(raw.get("mamba_rms_norm", False)),
        norm_first=bool(raw.get("mamba_norm_before_gate", True)),
        multipliers=() if set(own) == {1.0} else own,
    )
    mixers = [
        BesideStatesSpec(
            replace(read, scale=read.scale * inputs**2 * number("key")),
            states,
            of_states=number("ssm_out"),
            of_attention=inputs * number("attention_out"),  # inputs: of the values
        )
        for read in attentions(raw)
    ]
    return decoder(
        raw,
        mixers,
        dense(raw, multipliers=None if gates == outputs == 1.0 else (gates, outputs)),
        embedding=EmbeddingSpec(number("embedding")),
        logit_scale=number("lm_head"),
    )
