"""A decoder and its parts, by the fields of a config.json. Functions raise `ModelError`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.fields import require, require_only
from soothsay.model.families.layer_fields import (
    Raw,
    Windows,
    count,
    heads_of,
    main_rope,
    rotations,
    scaled_context,
    windows,
)
from soothsay.model.specs.attention_spec import (
    AttentionSpec,
    HeadNorms,
    HeadRotation,
    LatentSpec,
    QueryGrowthSpec,
    RopeSpec,
)
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)
from soothsay.model.specs.state_specs import DeltaSpec, StateSpaceSpec

RMS_NORM = NormSpec()
MAX_SPANS = 2**12
"""Limit of the original contexts in a context, for queries that grow with each of them."""


def norm_eps(raw: Raw) -> float:
    """The number that norms add to the mean square."""
    return float(raw.get("rms_norm_eps", 1e-6))


def head_norms(raw: Raw, **own: bool) -> HeadNorms:
    """Norms of queries and keys. `own`: fields in which a family differs."""
    return HeadNorms(norm_eps(raw), **own)


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
    windowed = windows(raw) if windowed is None else windowed
    heads, kv_heads, size = heads_of(raw)
    rotated = rotations(raw) if rotated is None else rotated
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
        growth=growth_by_context(raw, rope),
        softcap=raw.get("attn_logit_softcapping"),
        bias=bias,
        o_bias=bias,
    )
    return [replace(every, window=window) for window in windows(raw)]


def query_growth(beta: float, span: int, max_positions: int, name: str, shift: int = 0) -> QueryGrowthSpec:
    """Queries that grow with the position, each `span` positions. `name` is the key of the span."""
    require(max_positions <= MAX_SPANS * span, f"{name} {span} is too small for its context")
    return QueryGrowthSpec(float(beta), span, max_positions, shift)


def growth_by_context(raw: Raw, rope: RopeSpec) -> QueryGrowthSpec | None:
    """The growth by `llama_4_scaling_beta` among the rotary parameters, each original context."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if (beta := scaling.get("llama_4_scaling_beta")) is None:
        return None
    span, context = rope.original_max_positions, scaled_context(raw, rope)
    return query_growth(beta, span, context, "original_max_position_embeddings")


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""From a name in `config.json` to ours."""


def activation(raw: Raw, known: Mapping[str, str] = ACTIVATIONS) -> str:
    """Our name of the file's activation."""
    name = raw.get("hidden_act", "silu")
    if name not in known:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(known)}")
    return known[name]


def dense(raw: Raw, known: Mapping[str, str] = ACTIVATIONS, **own: Any) -> list[DenseSpec]:
    """The dense part of each layer. `own`: fields in which a family's layers differ from Llama's."""
    part = DenseSpec(
        int(raw["intermediate_size"]), activation(raw, known), bool(raw.get("mlp_bias", False)), **own
    )
    return [part] * count(raw)


def experts(
    raw: Raw,
    *,
    known: Mapping[str, str] = ACTIVATIONS,
    correction: str | None = None,
    shared_size: int | None = None,
    routing: Mapping[str, Any] | None = None,
    **own: Any,
) -> list[MLPSpec]:
    """The part of each layer: a mixture of experts, or dense.

    Args:
        raw: the file.
        known: the activations that the family may have.
        correction: experts are chosen as in DeepSeek-V3: by sigmoids, corrected by the tensor of this name.
        shared_size: size of the part beside the experts; None: by `n_shared_experts`.
        routing: fields of the routing in which the family differs.
        own: fields of the mixture in which the family differs.
    """
    plain = dense(raw, known)
    if raw.get("num_local_experts") == 0:
        return [*plain]
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    number = next((int(raw[name]) for name in names if raw.get(name)), 0) or int(raw["num_experts"])
    used, size = (
        int(raw["num_experts_per_tok"]),
        int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
    )
    groups, kept = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    fields = {
        "normalize": bool(raw.get("norm_topk_prob", False)),
        "sigmoid": correction is not None,
        "scale": float(raw.get("routed_scaling_factor", 1.0)),
        "group_best": 1 if correction is None else 2,
        **(routing or {}),
    }
    require(1 <= used <= number, f"num_experts_per_tok is {used}, and there are {number} experts")
    require(
        number % groups == 0
        and kept <= groups
        and used <= number // groups * kept
        and (groups == 1 or groups <= number // fields["group_best"]),
        f"{used} of {number} experts cannot be chosen from {kept} (topk_group) of {groups} groups (n_group)",
    )
    if shared_size is None:
        shared_size = size * int(raw.get("n_shared_experts", raw.get("num_shared_experts", 0)))
    kind, bias = plain[0].activation, plain[0].bias
    mixture = ExpertsSpec(
        RoutingSpec(number, used, groups=groups, groups_chosen=kept, **fields),
        DenseSpec(size, kind, bias),
        DenseSpec(shared_size, kind, bias) if shared_size else None,
        correction=correction if raw.get("use_expert_bias", True) else None,
        **own,
    )
    return [mixture if sparse else part for sparse, part in zip(_sparse(raw), plain, strict=True)]


def _sparse(raw: Raw) -> list[bool]:
    """For each layer, whether it has experts."""
    if "mlp_layer_types" in raw:
        kinds = raw["mlp_layer_types"]
        require(len(kinds) == count(raw), f"mlp_layer_types has {len(kinds)} entries for {count(raw)} layers")
        if unknown := set(kinds) - {"dense", "sparse"}:
            raise ModelError(f"config.json: mlp_layer_types has {min(unknown)!r}, not dense or sparse")
        return [kind == "sparse" for kind in kinds]
    listed, first = set(raw.get("mlp_only_layers") or ()), int(raw.get("first_k_dense_replace") or 0)
    step, frequency = int(raw.get("decoder_sparse_step") or 1), int(raw.get("moe_layer_freq") or 1)
    return [
        i >= first and i not in listed and (i + 1) % step == 0 and i % frequency == 0
        for i in range(count(raw))
    ]


def delta(raw: Raw, by_key_head: tuple[str, ...]) -> DeltaSpec:
    """A gated delta rule."""
    key_heads, value_heads = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
    require(
        value_heads % key_heads == 0,
        f"{value_heads} linear_num_value_heads cannot share {key_heads} linear_num_key_heads evenly",
    )
    require_silu(raw, "hidden_act")
    return DeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=int(raw["linear_key_head_dim"]),
        value_size=int(raw["linear_value_head_dim"]),
        taps=int(raw["linear_conv_kernel_dim"]),
        norm_eps=norm_eps(raw),
        tiled=bool(raw.get("linear_heads_tiled", False)),
        by_key_head=by_key_head,
    )


def state_space(raw: Raw) -> StateSpaceSpec:
    """Mamba-2."""
    heads, groups = int(raw["mamba_n_heads"]), int(raw["mamba_n_groups"])
    size = int(raw.get("mamba_d_ssm") or int(raw["mamba_expand"]) * int(raw["hidden_size"]))
    require(
        size % heads == 0 and heads % groups == 0,
        f"{heads} mamba_n_heads, in {groups} mamba_n_groups, cannot share {size} evenly",
    )
    if raw.get("mamba_d_head", "auto") not in ("auto", size // heads):
        raise ModelError(
            f"config.json: mamba_d_head is {raw['mamba_d_head']!r:.40}, and {heads} heads share {size}"
        )
    require_only(raw, mamba_conv_bias=True, mamba_proj_bias=False)
    require(not _is_limited(raw.get("time_step_limit")), "time_step_limit is supported only as 0 to infinity")
    require_silu(raw, "mamba_hidden_act" if "mamba_hidden_act" in raw else "hidden_act")
    return StateSpaceSpec(
        heads=heads,
        head_size=size // heads,
        groups=groups,
        state_size=int(raw["mamba_d_state"]),
        taps=int(raw["mamba_d_conv"]),
        norm_eps=norm_eps(raw),
    )


def require_silu(raw: Raw, key: str) -> None:
    """Raise `ModelError` if convolutions before a state end with another function."""
    require(activation({"hidden_act": raw.get(key, "silu")}) == "silu", f"{key} is supported only as silu")


def _is_limited(limit: Any) -> bool:
    """Whether steps have other bounds than 0 and infinity, which transformers writes as an object."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return limit is not None
    least, most = limit
    return least != 0 or not (most == {"__float__": "Infinity"} or (isinstance(most, float) and most >= 1e30))


def decoder(
    raw: Raw,
    mixers: Sequence[MixerSpec | None],
    mlps: Sequence[MLPSpec | None],
    *,
    embedding: EmbeddingSpec | None = None,
    logit_scale: float | None = None,
    residual: float = 1.0,
    max_positions: int | None = None,
    norm: NormSpec = RMS_NORM,
    head_bias: bool = False,
    zero_centred_norms: bool = False,
    **layer: Any,
) -> ModelSpec:
    """A decoder of these parts.

    Args:
        raw: the file.
        mixers: of each layer.
        mlps: of each layer.
        embedding: the table; None: it is not scaled.
        logit_scale: factor of logits; None: the file's.
        residual: the factor of what layers add to the stream.
        max_positions: the context; None: by the file and its rotary positions.
        norm: what norms compute; the epsilon is the file's.
        head_bias: the output head has a bias.
        zero_centred_norms: a norm's weight w is stored as w - 1.
        layer: fields of all layers in which they differ from Llama's.

    Raises `ModelError`.
    """
    eps = norm_eps(raw)
    # the stream is divided by the factor, and its mean square by the square
    own = replace(norm, eps=eps / residual**2)
    layers = tuple(LayerSpec(*parts, own, **layer) for parts in zip(mixers, mlps, strict=True))
    spec = ModelSpec(
        family=str(raw["model_type"]),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        layers=layers,
        max_positions=max_positions or 0,
        norm=replace(norm, eps=eps),
        embedding=embedding or EmbeddingSpec(),
        head=HeadSpec(
            bool(raw.get("tie_word_embeddings", False)),
            head_bias,
            float(raw.get("logit_scale", 1.0)) if logit_scale is None else logit_scale,
            raw.get("final_logit_softcapping"),
        ),
        residual_multiplier=residual,
        zero_centred_norms=zero_centred_norms,
    )
    require(
        not raw.get("use_qk_norm") or any(own.norms for own in spec.parts(AttentionSpec).values()),
        "use_qk_norm (as in Command R+) is not supported; take another model",
    )
    return replace(spec, max_positions=max_positions or scaled_context(raw, spec.rotation.rope))


def llama_like(
    raw: Raw,
    windowed: Windows | None = None,
    rotated: Sequence[HeadRotation] | None = None,
    mlps: Sequence[MLPSpec] | None = None,
    layer: Mapping[str, Any] = MappingProxyType({}),
    **own: Any,
) -> ModelSpec:
    """A decoder as Llama.

    Args:
        raw: the file.
        windowed: see `attentions`.
        rotated: see `attentions`.
        mlps: the feed-forward part of each layer; None: dense ones.
        layer: arguments of `decoder` in which the family differs.
        own: fields of attention in which it differs.
    """
    mixers = attentions(raw, windowed, rotated, **own)
    return decoder(raw, mixers, dense(raw) if mlps is None else mlps, **layer)
