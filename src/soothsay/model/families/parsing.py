"""How the `config.json` of each family becomes a `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from soothsay.config import ExpertsConfig, LatentConfig, ModelConfig, QueryGrowthConfig, RopeConfig
from soothsay.errors import ModelError
from soothsay.model.families.family import Family
from soothsay.model.families.fields import MAX_POSITIONS, checked_fields
from soothsay.model.families.layers import Raw
from soothsay.model.families.rope import parse_rope
from soothsay.model.families.states import parse_convolution, parse_delta, parse_state_space
from soothsay.model.families.table import FAMILIES, UNSUPPORTED
from soothsay.model.families.text_defaults import completed

NO_DECODERS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""Ends of names in `architectures` of models with another head than one for tokens."""

MAX_SPANS = 2**12
"""Limit of the original contexts in a context, for queries that grow with each of them."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""From a name in `config.json` to ours."""


def parse_model_config(raw: Raw) -> ModelConfig:
    """Turn the content of a Hugging Face `config.json` into a `ModelConfig`.

    Raises `ModelError`, which names what is missing, unknown or out of range.
    """
    text = raw.get("text_config")
    _require_family(text if isinstance(text, Mapping) else raw)  # before fields, which may mean other things
    if isinstance(text, Mapping):
        raw = {**raw, "text_config": completed(text)}
    raw = checked_fields(raw)
    if "text_config" in raw:  # a multimodal wrapper, such as gemma3: the decoder's part is inside
        shared = "tie_word_embeddings", "architectures"
        outer: Raw = {key: raw[key] for key in shared if key in raw}
        raw = {**raw["text_config"], **outer}
    _require_decoder(raw)
    name = str(raw["model_type"])
    family = FAMILIES[name]
    try:
        raw = family.rewritten({**family.defaults, **raw})
        return family.finished(raw, _parse(name, family, raw))
    except KeyError as error:
        raise ModelError(f"config.json of family {name!r} has no {error.args[0]!r}") from None


def _require_decoder(raw: Raw) -> None:
    """Raises `ModelError` for a model whose tokens see later ones, or that has no output head for tokens."""
    for key, encodes in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        if raw.get(key) in encodes:
            raise ModelError(
                f"config.json: {key} {raw[key]!r} makes an encoder, not a decoder; it writes no text"
            )
    for name in raw.get("architectures") or ():
        if str(name).endswith(NO_DECODERS):
            raise ModelError(
                f"config.json: a {name:.80} judges texts, and writes none; take the causal model"
            )


def _require_family(raw: Raw) -> None:
    """Raises `ModelError` for a family that is not supported."""
    name = raw.get("model_type") or ""
    if isinstance(name, str) and name in FAMILIES:
        return
    named = f"model_type {name!r:.80}" if name else f"architectures {raw.get('architectures')!r:.80}"
    if isinstance(name, str) and name in UNSUPPORTED:
        raise ModelError(f"{named} is not supported: {UNSUPPORTED[name]}")
    raise ModelError(f"{named} is not a family that soothsay knows: {', '.join(FAMILIES)}")


def _parse(name: str, family: Family, raw: Raw) -> ModelConfig:
    layers, (heads, kv_heads, head_dim) = int(raw["num_hidden_layers"]), _heads(family, raw)
    qk_norm = bool(raw.get("use_qk_norm", False))
    if qk_norm and not (family.reads_qk_norm or family.qk_norm):
        raise ModelError("config.json: use_qk_norm (as in Command R+) is not supported; take another model")
    hidden = int(raw["hidden_size"])
    rotary_dim = _rotary_dim(family, raw, head_dim)
    windows = _windows(family, raw, layers)
    rope, second_rope, second_rope_layers = _ropes(family, raw, rotary_dim or head_dim, windows)
    max_positions = _max_positions(family, raw, rope)
    activation = _activation(family, raw)
    latent = _latent(raw) if family.latent else None
    attention_bias = bool(raw.get("attention_bias", family.default_attention_bias))
    return ModelConfig(
        family=name,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rope=rope,
        second_rope=second_rope,
        second_rope_layers=second_rope_layers,
        windows=windows,
        rotary_dim=rotary_dim,
        norm_eps=float(raw.get(family.norm_eps_key, family.default_norm_eps)),
        activation=activation,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.default_tied)),
        qkv_bias=family.qkv_bias_only or attention_bias,
        o_bias=attention_bias and family.o_bias and not family.qkv_bias_only,
        mlp_bias=family.biased_experts or bool(raw.get("mlp_bias", False)),
        rotates_neighbours=bool(raw.get("rope_interleave", True))
        if family.latent
        else family.rotates_neighbours,
        qk_norm=family.qk_norm or (qk_norm and not family.tunes_temperature),
        qk_unit_norm=family.tunes_temperature and bool(raw.get("use_qk_norm", True)),
        qk_norm_over_heads=family.qk_norm_over_heads,
        zero_centred_norms=family.zero_centred_norms,
        centred_norms=family.centred_norms,
        parallel=family.parallel,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        attention_softcap=raw.get("attn_logit_softcapping"),
        sinks=family.sinks,
        query_growth=_query_growth(family, raw, rope, max_positions),
        logit_softcap=raw.get("final_logit_softcapping"),
        experts=_experts(family, raw, layers)
        if family.has_experts and raw.get("num_local_experts") != 0
        else None,
        latent=latent,
        delta=parse_delta(raw, layers) if family.has_states else None,
        convolution=parse_convolution(raw, layers) if family.has_convolutions else None,
        state_space=parse_state_space(raw, layers) if family.has_state_spaces else None,
        gated_attention=family.has_states,
        **{
            **_scales(family, raw, hidden, head_dim),
            **({} if latent is None else _latent_scale(latent, rope)),
        },
    )


def _latent(raw: Raw) -> LatentConfig:
    query_rank = raw.get("q_lora_rank")
    return LatentConfig(
        rank=int(raw["kv_lora_rank"]),
        rotated=int(raw["qk_rope_head_dim"]),
        plain=int(raw["qk_nope_head_dim"]),
        value=int(raw["v_head_dim"]),
        query_rank=None if query_rank is None else int(query_rank),
    )


def _latent_scale(latent: LatentConfig, rope: RopeConfig) -> dict[str, float]:
    """The factor of scores, as a field. YaRN sharpens all dimensions by it, those that do not rotate too."""
    sharpened = 1.0
    if rope.factor > 1 and rope.mscale_all_dim:
        sharpened = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return {"attention_scale": (latent.plain + latent.rotated) ** -0.5 * sharpened**2}


def _heads(family: Family, raw: Raw) -> tuple[int, int, int]:
    """The heads of queries, those of keys and values, and the size of a head."""
    if family.latent:
        raw = {**raw, "num_key_value_heads": 1, "head_dim": raw["qk_rope_head_dim"]}
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if "head_dim" not in raw and hidden % heads:
        raise ModelError(f"config.json: {heads} attention heads do not divide hidden_size {hidden}")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if head_dim % 2:
        raise ModelError(
            f"config.json: heads of {head_dim} dimensions cannot be rotated; head_dim must be even"
        )
    return heads, kv_heads, head_dim


def _scales(family: Family, raw: Raw, hidden: int, head_dim: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that scale embeddings, residuals, attention and logits."""
    if family.has_multipliers:
        return {
            "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
            "residual_multiplier": float(raw.get("residual_multiplier", 1.0)),
            "attention_scale": float(raw.get("attention_multiplier", 1.0)),
            "logit_scale": 1 / float(raw.get("logits_scaling", 1.0)),
        }
    return {
        "logit_scale": float(raw.get("logit_scale", family.default_logit_scale)),
        "embedding_scale": hidden**0.5 if family.scaled_embedding else 1.0,
        "embedding_scale_rounded": family.scaled_embedding,
        "attention_scale": float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
    }


def _query_growth(family: Family, raw: Raw, rope: RopeConfig, context: int) -> QueryGrowthConfig | None:
    if family.tunes_temperature and raw.get("attn_temperature_tuning", True):
        name, span, beta = "floor_scale", int(raw.get("floor_scale") or 8192), raw.get("attn_scale", 0.1)
        growth = QueryGrowthConfig(float(beta), span, shift=1, unrotated=True)
    else:
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        beta, span = scaling.get("llama_4_scaling_beta"), rope.original_max_positions
        if beta is None or not family.grows_queries:
            return None
        name, growth = "original_max_position_embeddings", QueryGrowthConfig(float(beta), span)
    if context > MAX_SPANS * span:
        raise ModelError(f"config.json: {name} {span} is too small for its context")
    return growth


def _activation(family: Family, raw: Raw) -> str:
    name = raw.get(family.activation_key, family.default_activation)
    if family.clipped_swiglu and name == "silu":
        return "clipped_swiglu"
    known = {"relu2": "relu2"} if family.default_activation == "relu2" else ACTIVATIONS
    if name not in known:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(known)}")
    return known[name]


def _experts(family: Family, raw: Raw, layers: int) -> ExpertsConfig:
    dense = {*(raw.get("mlp_only_layers") or ()), *range(int(raw.get("first_k_dense_replace") or 0))}
    step, frequency = int(raw.get("decoder_sparse_step") or 1), int(raw.get("moe_layer_freq") or 1)
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    count = next((int(raw[name]) for name in names if raw.get(name)), 0) or int(raw["num_experts"])
    used = int(raw["num_experts_per_tok"])
    size = int(raw.get("moe_intermediate_size") or raw["intermediate_size"])
    groups, kept = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    group_best = 2 if family.routes_by_sigmoid else 1
    if not 1 <= used <= count:
        raise ModelError(f"config.json: num_experts_per_tok is {used}, and there are {count} experts")
    if count % groups or kept > groups or used > count // groups * kept or 1 < groups > count // group_best:
        raise ModelError(
            f"config.json: {used} of {count} experts cannot be chosen from {kept} (topk_group) of {groups} "
            "groups (n_group)"
        )
    by_sigmoid = family.routes_by_sigmoid or family.scales_expert_inputs
    return ExpertsConfig(
        count=count,
        chosen=used,
        size=size,
        layers=tuple(
            i for i in range(layers) if i not in dense and (i + 1) % step == 0 and i % frequency == 0
        ),
        normalize=family.always_normalizes_experts or bool(raw.get("norm_topk_prob", False)),
        sigmoid=by_sigmoid,
        corrected=family.routes_by_sigmoid and bool(raw.get("use_expert_bias", True)),
        correction_name=family.correction_name,
        groups=groups,
        groups_chosen=kept,
        group_best=group_best,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        router_bias=family.biased_experts,
        shared_size=_shared_size(family, raw, size),
        shared_gate=family.has_states,
        scales_inputs=family.scales_expert_inputs,
    )


def _shared_size(family: Family, raw: Raw, size: int) -> int:
    """The size of the part that runs beside the experts."""
    if family.has_states:
        return int(raw["shared_expert_intermediate_size"])
    if family.has_multipliers:
        return int(raw.get("shared_intermediate_size") or 0)
    return size * int(raw.get("n_shared_experts") or 0)


def _rotary_dim(family: Family, raw: Raw, head_dim: int) -> int | None:
    """Dimensions of a head that rotate; None: all."""
    if family.rotates_share is None:
        return None
    share = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", family.rotates_share)
    rotary_dim = int(head_dim * raw.get("partial_rotary_factor", share))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json: by its partial_rotary_factor, {rotary_dim} of {head_dim} dimensions of each head "
            "rotate; the number must be even"
        )
    return None if rotary_dim == head_dim else rotary_dim


def _ropes(
    family: Family, raw: Raw, dims: int, windows: Sequence[int | None]
) -> tuple[RopeConfig, RopeConfig | None, tuple[int, ...]]:
    """The rotary embedding of most layers, the second one, and the layers that have the second one."""
    positions = int(raw["max_position_embeddings"])
    original = int(raw.get("original_max_position_embeddings") or positions)
    theta = float(raw.get("rope_theta") or family.default_theta)
    local_theta = float(raw.get("rope_local_base_freq") or family.local_theta or theta)
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}

    def parse(scaling: Raw, theta: float) -> RopeConfig:
        return parse_rope(scaling, theta, positions, original, dims)

    local: Raw = {}
    if "full_attention" in scaling:  # transformers 5 writes one mapping for each kind of layer
        scaling, local = scaling["full_attention"], scaling["sliding_attention"]
    if family.unrotated is not None:
        second, chosen = RopeConfig(kind="none"), family.unrotated(raw, windows)
    else:
        second = parse(local, local_theta)
        chosen = [family.local_rope and window is not None for window in windows]
    layers = tuple(i for i, is_chosen in enumerate(chosen) if is_chosen)
    return parse(scaling, theta), second if layers or family.local_rope else None, layers


def _max_positions(family: Family, raw: Raw, rope: RopeConfig) -> int:
    """The context after scaling. A file with llama3 scaling states the scaled context already."""
    positions = int(raw["max_position_embeddings"])
    if rope.kind == "yarn":
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    elif rope.kind == "linear" and not family.states_scaled_context:
        positions = int(positions * rope.factor)
    if not 1 <= positions <= MAX_POSITIONS:
        raise ModelError(
            f"config.json: a context of {positions:,} tokens, scaled by {rope.factor:g}, is not possible"
        )
    return positions


def _windows(family: Family, raw: Raw, layers: int) -> tuple[int | None, ...]:
    window = raw.get("attention_chunk_size" if family.chunked else "sliding_window")
    if not window or (family.window_switch and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = raw.get("layer_types") if family.reads_layer_types else None
    local = "chunked_attention" if family.chunked else "sliding_attention"
    windowed = [kind == local for kind in kinds] if kinds else family.windowed(raw, layers)
    if len(windowed) != layers:
        raise ModelError(f"config.json: layer_types has {len(windowed)} entries for {layers} layers")
    size = -int(window) if family.chunked else int(window)
    return tuple(size if has_window else None for has_window in windowed)
