"""Families whose layers keep states: Granite 3 and 4, Bamba, Falcon-H1, Nemotron-H, LFM2, Jamba, Mamba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.decoder import (
    attentions,
    decoder,
    dense,
    experts,
    head_norms,
    norm_eps,
    require_silu,
    state_space,
)
from soothsay.model.families.fields import require, require_only
from soothsay.model.families.layer_fields import Raw, count, every, mixed, rotations, sizes
from soothsay.model.specs.attention_spec import AttentionSpec, HeadRotation
from soothsay.model.specs.feed_forward_spec import SQUARED_RELU
from soothsay.model.specs.model_spec import EmbeddingSpec, MixerSpec, MLPSpec, ModelSpec
from soothsay.model.specs.state_specs import BesideStatesSpec, ConvolutionSpec, SelectiveSpec

MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE_DEFAULTS = {**MAMBA_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
"""What files may leave out, as transformers has it."""


def granite(raw: Raw) -> ModelSpec:
    """Granite 3."""
    return _scaled(raw, _attentions(raw), dense(raw))


def granitemoe(raw: Raw) -> ModelSpec:
    """Granite 3 with experts."""
    return _scaled(raw, _attentions(raw), _experts(raw))


def granitemoehybrid(raw: Raw) -> ModelSpec:
    """Granite 4: most layers are Mamba-2's. The others do not rotate, unless the file says so.

    Bamba's files in GGUF are of this kind, too. A part of their heads rotates.
    """
    raw = {**GRANITE_DEFAULTS, **raw}
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    kinds = ["mamba"] * count(raw) if kinds is None else kinds
    usual = {"mamba": "linear_attention", "attention": "full_attention"}
    raw = {**raw, "layer_types": [usual.get(kind, kind) for kind in kinds]}
    if not raw["num_local_experts"]:
        require(
            raw["shared_intermediate_size"], "without experts, shared_intermediate_size should be above 0"
        )
        raw = {**raw, "intermediate_size": raw["shared_intermediate_size"]}
    still = [raw.get("position_embedding_type") != "rope"] * count(raw)
    mixers = mixed(raw, state_space(raw), _attentions(raw, rotations(raw, share=1.0, unrotated=still)))
    return _scaled(raw, mixers, _experts(raw))


def _attentions(raw: Raw, rotated: Sequence[HeadRotation] | None = None) -> list[AttentionSpec]:
    return attentions(raw, rotated=rotated, scale=float(raw.get("attention_multiplier", 1.0)))


def _experts(raw: Raw) -> list[MLPSpec]:
    shared = int(raw.get("shared_intermediate_size") or 0)
    return experts(raw, shared_size=shared, routing={"normalize": True})


def _scaled(raw: Raw, mixers: Sequence[MixerSpec], mlps: Sequence[MLPSpec]) -> ModelSpec:
    return decoder(
        raw,
        mixers,
        mlps,
        embedding=EmbeddingSpec(float(raw.get("embedding_multiplier", 1.0))),
        residual=float(raw.get("residual_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )


def bamba(raw: Raw) -> ModelSpec:
    """Bamba: Mamba-2, and attention in some layers, half of whose heads' dimensions rotate."""
    raw = {**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, **raw}
    read, attending = attentions(raw, rotated=rotations(raw, share=0.5)), raw.get("attn_layer_indices", ())
    return decoder(raw, mixed(raw, state_space(raw), read, lambda layer: layer in attending), dense(raw))


def falcon_h1(raw: Raw) -> ModelSpec:
    """All layers have Mamba-2 beside attention."""
    require_only(raw, attention_bias=False, mlp_bias=False, projectors_bias=False)
    raw = {**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, **raw}

    def number(name: str) -> float:
        return float(raw.get(f"{name}_multiplier", 1.0))

    def numbers(name: str, count: int) -> tuple[float, ...]:
        values = raw.get(f"{name}_multipliers", [1.0] * count)
        require(len(values) == count, f"{name}_multipliers has {len(values)} entries, and not {count}")
        return tuple(map(float, values))

    inputs, (gates, outputs) = number("attention_in"), numbers("mlp", 2)
    own = tuple(number("ssm_in") * part for part in numbers("ssm", 5))
    states = replace(
        state_space(raw),
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


NEMOTRON_DEFAULTS: Raw = {
    **sizes(131_072, 4096, 21_504, None, 32, 8, 4096),
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mamba_hidden_act": "silu",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
}
"""What files may leave out, as transformers has it."""

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""

MIXERS = ("linear_attention", "full_attention")
KNOWN = {SQUARED_RELU: SQUARED_RELU}  # activations
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h(raw: Raw) -> ModelSpec:
    """Each layer is one part, and none rotates."""
    raw = {**NEMOTRON_DEFAULTS, **raw}
    kinds = _kinds(raw)
    require_only(raw, attention_bias=False)
    raw = {
        **raw,
        "num_hidden_layers": len(kinds),
        "layer_types": None,
        "hidden_act": raw.get("mlp_hidden_act", SQUARED_RELU),
        **_mamba2_keys(raw, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    }
    still = rotations(raw, unrotated=every(raw))
    parts: dict[str, Sequence[Any]] = {
        "full_attention": attentions(raw, rotated=still),
        "linear_attention": [state_space(raw)] * len(kinds),
        "mlp": dense(raw, KNOWN),
        "moe": _nemotron_experts(raw) if "moe" in kinds else (),
    }
    mixers = [parts[kind][i] if kind in MIXERS else None for i, kind in enumerate(kinds)]
    mlps = [None if kind in MIXERS else parts[kind][i] for i, kind in enumerate(kinds)]
    return decoder(raw, mixers, mlps)


def _mamba2_keys(raw: Raw, heads: str, size: str, states: str) -> Raw:
    """The usual keys of Mamba-2's layers, and of norms. `heads`, `size`, `states`: the file's own keys."""
    return {
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "mamba_n_heads": raw[heads],
        "mamba_d_ssm": int(raw[heads]) * int(raw[size]),
        "mamba_d_head": raw[size],
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw[states],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": raw.get("use_conv_bias", True),
        "mamba_proj_bias": raw.get("use_bias", False),
    }


MAMBA_CONTEXT = 2**20
"""Context of Mamba and Mamba-2, whose files state none: no layer limits it. llama.cpp writes the same."""


def mamba2(raw: Raw) -> ModelSpec:
    """Mamba-2 alone: no layer has attention or a feed-forward part."""
    raw = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4, **raw}
    raw = {**raw, **_mamba2_keys(raw, "num_heads", "head_dim", "state_size")}
    return _states_alone(raw, state_space(raw))


def mamba(raw: Raw) -> ModelSpec:
    """Mamba alone."""
    usual = {"tie_word_embeddings": True, "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5)}
    raw = {**usual, "mamba_d_inner": raw.get("intermediate_size"), **raw}
    return _states_alone(raw, _selective(raw, "expand", "state_size", "conv_kernel", "time_step_rank"))


def falcon_mamba(raw: Raw) -> ModelSpec:
    """Mamba with norms of steps, B and C that have no weights."""
    spec = mamba(raw)
    normed = replace(spec.first(SelectiveSpec), norm_eps=float(raw.get("mixer_rms_eps", 1e-6)))
    return replace(spec, layers=tuple(replace(layer, mixer=normed) for layer in spec.layers))


def _states_alone(raw: Raw, mixer: MixerSpec) -> ModelSpec:
    layers, positions = count(raw), int(raw.get("max_position_embeddings", MAMBA_CONTEXT))
    return decoder(raw, [mixer] * layers, [None] * layers, max_positions=positions)


def _selective(raw: Raw, expand: str, states: str, taps: str, rank: str) -> SelectiveSpec:
    """Mamba. The names are the file's own keys."""
    hidden, given = int(raw["hidden_size"]), raw.get(rank, "auto")
    require_silu(raw, "hidden_act")
    require_only(raw, use_conv_bias=True, mamba_conv_bias=True, use_bias=False, mamba_proj_bias=False)
    return SelectiveSpec(
        size=int(raw.get("mamba_d_inner") or int(raw.get(expand, 2)) * hidden),
        state_size=int(raw.get(states, 16)),
        rank=-(-hidden // 16) if given == "auto" else int(given),
        taps=int(raw.get(taps, 4)),
    )


JAMBA_DEFAULTS = {
    **{"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    **{"attn_layer_period": 8, "attn_layer_offset": 4, "num_key_value_heads": 8},
}


def jamba(raw: Raw) -> ModelSpec:
    """Mamba with norms, attention in each eighth layer, and experts in each second one. Nothing rotates."""
    raw = {**JAMBA_DEFAULTS, **raw}

    def turns(kind: str) -> list[bool]:
        period, offset = int(raw[f"{kind}_layer_period"]), int(raw[f"{kind}_layer_offset"])
        return [i % period == offset for i in range(count(raw))]

    own = _selective(raw, "mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank")
    own = replace(own, norm_eps=norm_eps(raw), learned=True)
    read = attentions(raw, rotated=rotations(raw, unrotated=every(raw)))
    mixers = mixed(raw, own, read, turns("attn").__getitem__)
    if raw["num_experts"] < 2:
        return decoder(raw, mixers, dense(raw))
    sparse = raw.get("mlp_layer_types") or ["sparse" if has else "dense" for has in turns("expert")]
    return decoder(raw, mixers, experts({**raw, "mlp_layer_types": sparse}))


def _nemotron_experts(raw: Raw) -> Sequence[MLPSpec]:
    latent, shared = raw.get("moe_latent_size"), int(raw["moe_shared_expert_intermediate_size"])
    return experts(
        {**raw, "num_local_experts": int(raw["n_routed_experts"])},
        known=KNOWN,
        correction="e_score_correction_bias",
        shared_size=shared,
        latent_size=None if latent is None else int(latent),
    )


def _kinds(raw: Raw) -> Sequence[str]:
    """The kind of each layer. At least one should have attention."""
    listed = raw.get("layers_block_type")
    if listed is None:
        pattern = raw["hybrid_override_pattern"]
        kinds = [KINDS.get(letter, letter) for letter in pattern]
    else:
        kinds = [OLDER_KINDS.get(kind, kind) for kind in listed]
    if unknown := set(kinds) - set(KINDS.values()):
        raise ModelError(f"config.json: layers of kind {min(unknown)!r:.40} are not supported")
    require("full_attention" in kinds, "a model without attention is not supported")
    return kinds


LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "conv_L_cache": 3,
    "rope_theta": 1e6,
}
LFM2_EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
}


def lfm2(raw: Raw) -> ModelSpec:
    """The size of feed-forward parts may be derived."""
    size = int(raw.get("block_ff_dim") or raw["intermediate_size"])
    if raw.get("block_auto_adjust_ff_dim", True):
        step = int(raw.get("block_multiple_of") or 256)
        size = int(float(raw.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        size = -(-size // step) * step
    raw = {**raw, "intermediate_size": size}
    return _convolutions(raw, dense(raw))


def lfm2_moe(raw: Raw) -> ModelSpec:
    """`num_dense_layers` takes the place of `first_k_dense_replace`."""
    raw = {**LFM2_EXPERTS, **raw, "first_k_dense_replace": int(raw.get("num_dense_layers", 2))}
    return _convolutions(raw, experts(raw, correction="expert_bias"))


def _convolutions(raw: Raw, mlps: Sequence[MLPSpec]) -> ModelSpec:
    require_only(raw, conv_bias=False)
    raw = {
        **LFM2_DEFAULTS,
        **raw,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
    }
    own = ConvolutionSpec(int(raw["hidden_size"]), int(raw["conv_L_cache"]))
    read = attentions(raw, norms=head_norms(raw))
    full = raw.get("full_attn_idxs", range(count(raw)))
    return decoder(raw, mixed(raw, own, read, lambda layer: layer in full, "conv"), mlps)
