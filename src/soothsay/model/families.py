"""The model families: how the `config.json` of each becomes a `ModelConfig`.

A new family is one entry of `FAMILIES`. The names of its tensors stand in `soothsay.model.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from soothsay.config import ModelConfig, QueryGrowthConfig, RopeConfig
from soothsay.errors import ModelError
from soothsay.model.config_fields import MAX_POSITIONS, checked_fields
from soothsay.model.rope_fields import parse_rope

Raw = Mapping[str, Any]
"""The content of a `config.json`."""

MAX_SPANS = 2**10
"""Limit of the original contexts in a context, for queries that grow with each of them."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""From a name in `config.json` to ours."""


def no_layer(raw: Raw, layers: int) -> list[bool]:
    """No layer has a sliding window."""
    return [False] * layers


def every_layer(raw: Raw, layers: int) -> list[bool]:
    """Every layer has a sliding window."""
    return [True] * layers


def even_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers 0, 2, 4, ... have a sliding window."""
    return [i % 2 == 0 for i in range(layers)]


def all_but_each(default: int) -> Callable[[Raw, int], list[bool]]:
    """Each layer but every `sliding_window_pattern`-th has a sliding window."""

    def windowed(raw: Raw, layers: int) -> list[bool]:
        pattern = int(raw.get("sliding_window_pattern") or default)
        return [(i + 1) % pattern != 0 for i in range(layers)]

    return windowed


def full_layers(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """Layers without a sliding window."""
    return [window is None for window in windows]


def listed_layers(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """See `unrotated_layers`."""
    return unrotated_layers(raw, len(windows))


def unrotated_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers with 0 in `no_rope_layers`. Without it, each `no_rope_layer_interval`-th (default: fourth)."""
    interval = int(raw.get("no_rope_layer_interval") or 4)
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {layers} layers")
    return [not rotates for rotates in rotated[:layers]]


def last_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers from `max_window_layers` on have a sliding window."""
    return [i >= int(raw.get("max_window_layers", 28)) for i in range(layers)]


def all_or_none(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """All layers, unless `position_embedding_type` is "rope"."""
    return [raw.get("position_embedding_type") != "rope"] * len(windows)


def unchanged(raw: Raw) -> Raw:
    """The file's keys are the usual ones."""
    return raw


def dense_hybrid(raw: Raw) -> Raw:
    """A hybrid's configuration without recurrent layers and experts, as Granite 4's dense models have it."""
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"]
    if raw.get("num_local_experts", 8) or not set(kinds) <= {"attention", "full_attention"}:
        raise ModelError("config.json: a hybrid with recurrent layers or experts is not supported")
    return {**raw, "intermediate_size": raw["shared_intermediate_size"]}


@dataclass(frozen=True)
class Family:
    """What a family does unlike Llama, where its `config.json` does not say so."""

    qkv_bias_only: bool = False
    """Queries, keys and values have a bias whatever the file says, and attention's output has none."""

    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    default_attention_bias: bool = False
    o_bias: bool = True
    """Attention's output has a bias where queries have one."""

    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    default_tied: bool = False
    """Whether the output head is the embedding's table."""

    zero_centred_norms: bool = False
    parallel: bool = False
    centred_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""

    default_theta: float = 1e4
    norm_eps_key: str = "rms_norm_eps"
    default_norm_eps: float = 1e-6
    local_theta: float | None = 1e4
    """Base of layers with a window, where the file has no `rope_local_base_freq`. None: the others' base."""

    rotates_neighbours: bool = False
    rotates_share: float | None = None
    """Share of each head that rotates, where the file does not say so. None: all; files have no say."""

    local_rope: bool = False
    """Layers with a sliding window rotate by a rotary embedding of their own."""

    unrotated: Callable[[Raw, Sequence[int | None]], Sequence[bool]] | None = None
    """For each layer, by the windows of all, whether it does not rotate. None: all do."""

    states_scaled_context: bool = False
    """`max_position_embeddings` includes linear scaling."""

    grows_queries: bool = False
    """Queries grow with the position, by `llama_4_scaling_beta` among the rotary parameters."""

    default_logit_scale: float = 1.0
    has_multipliers: bool = False
    """Files scale embeddings, residuals, attention and logits, by Granite's keys."""

    has_experts: bool = False
    always_normalizes_experts: bool = False
    """The weights of the chosen experts add up to 1 whatever the file says."""

    windowed: Callable[[Raw, int], Sequence[bool]] = no_layer
    """For each layer, whether it has a sliding window, if the file has a `sliding_window`."""

    reads_layer_types: bool = True
    """Where the file has `layer_types`, they take the place of `windowed`."""

    window_switch: bool = False
    """A `sliding_window` counts only if `use_sliding_window` is true."""

    rewritten: Callable[[Raw], Raw] = unchanged
    """The file with the usual keys. Raises `ModelError` for a model that is not supported."""

    defaults: Raw = field(default_factory=dict)
    """Values that files of this family leave out."""


_GEMMA = Family(
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_tied=True,
    zero_centred_norms=True,
    post_norms=True,
    scaled_embedding=True,
)
_OLMO = Family(qk_norm=True, qk_norm_over_heads=True, pre_norms=False, post_norms=True, default_norm_eps=1e-5)
_GLM = Family(
    default_attention_bias=True,
    o_bias=False,
    rotates_neighbours=True,
    rotates_share=0.5,
    default_norm_eps=1.5625e-7,
)
_COHERE = Family(
    default_tied=True,
    rotates_neighbours=True,
    parallel=True,
    centred_norms=True,
    norm_eps_key="layer_norm_eps",
    default_norm_eps=1e-5,
    default_logit_scale=0.0625,
)
_GEMMA3_DEFAULTS = {  # Google's multimodal checkpoints leave out what equals transformers' defaults
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}

_QWEN2 = Family(qkv_bias_only=True, windowed=last_layers, window_switch=True)
_QWEN2_VL = replace(_QWEN2, default_theta=1e6, defaults={"max_window_layers": 80})
_QWEN3 = Family(qk_norm=True, windowed=last_layers, window_switch=True)

FAMILIES: dict[str, Family] = {  # by `model_type`
    "llama": Family(),
    "phi3": Family(windowed=every_layer, reads_layer_types=False, rotates_share=1.0),
    "mistral": Family(windowed=every_layer, reads_layer_types=False),
    "mixtral": Family(
        windowed=every_layer,
        reads_layer_types=False,
        default_theta=1e6,
        has_experts=True,
        always_normalizes_experts=True,
    ),
    "ministral3": Family(
        windowed=every_layer,
        reads_layer_types=False,
        default_theta=1e6,
        default_norm_eps=1e-5,
        grows_queries=True,
    ),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,  # older files of these have no `text_config`
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": Family(qk_norm=True, default_theta=5e5),
    "qwen3_moe": Family(
        qk_norm=True, windowed=every_layer, reads_layer_types=False, window_switch=True, has_experts=True
    ),
    "smollm3": Family(
        default_tied=True,
        default_theta=2e6,
        windowed=unrotated_layers,
        window_switch=True,
        unrotated=listed_layers,
    ),
    "granite": Family(has_multipliers=True),
    "granitemoehybrid": Family(has_multipliers=True, unrotated=all_or_none, rewritten=dense_hybrid),
    "glm": _GLM,
    "glm4": replace(_GLM, post_norms=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, windowed=all_but_each(4), unrotated=full_layers),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, windowed=all_but_each(4), default_theta=5e5, local_rope=True, local_theta=None),
    "gemma2": replace(_GEMMA, windowed=even_layers),
    "gemma3_text": replace(
        _GEMMA,
        qk_norm=True,
        windowed=all_but_each(6),
        default_theta=1e6,
        local_rope=True,
        states_scaled_context=True,
        defaults=_GEMMA3_DEFAULTS,
    ),
}


def parse_model_config(raw: Raw) -> ModelConfig:
    """Turn the content of a Hugging Face `config.json` into a `ModelConfig`.

    Raises `ModelError`, which names what is missing, unknown or out of range.
    """
    raw = checked_fields(raw)
    if "text_config" in raw:  # a multimodal wrapper, such as gemma3: the decoder's part is inside
        outer = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {**raw["text_config"], **outer}
    name = str(raw.get("model_type", ""))
    if name not in FAMILIES:
        named = f"model_type {name!r}" if name else f"architectures {raw.get('architectures')!r}"
        raise ModelError(f"{named} is not a family that soothsay knows: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    try:
        return _parse(name, family, family.rewritten({**family.defaults, **raw}))
    except KeyError as error:
        raise ModelError(f"config.json of family {name!r} has no {error.args[0]!r}") from None


def _parse(name: str, family: Family, raw: Raw) -> ModelConfig:
    layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if "head_dim" not in raw and hidden % heads:
        raise ModelError(f"config.json: {heads} attention heads do not divide hidden_size {hidden}")
    if raw.get("use_qk_norm"):
        raise ModelError("config.json: use_qk_norm (as in Command R+) is not supported; take another model")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if head_dim % 2:
        raise ModelError(
            f"config.json: heads of {head_dim} dimensions cannot be rotated; head_dim must be even"
        )
    rotary_dim = _rotary_dim(family, raw, head_dim)
    windows = _windows(family, raw, layers)
    rope, second_rope, second_rope_layers = _ropes(family, raw, rotary_dim or head_dim, windows)
    max_positions = _max_positions(family, raw, rope)
    activation = _activation(family, raw)
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
        rotates_neighbours=family.rotates_neighbours,
        norm_eps=float(raw.get(family.norm_eps_key, family.default_norm_eps)),
        activation=activation,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.default_tied)),
        qkv_bias=family.qkv_bias_only or attention_bias,
        o_bias=attention_bias and family.o_bias and not family.qkv_bias_only,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        qk_norm_over_heads=family.qk_norm_over_heads,
        zero_centred_norms=family.zero_centred_norms,
        centred_norms=family.centred_norms,
        parallel=family.parallel,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        attention_softcap=raw.get("attn_logit_softcapping"),
        query_growth=_query_growth(raw, rope, max_positions) if family.grows_queries else None,
        logit_softcap=raw.get("final_logit_softcapping"),
        **(_experts(family, raw, layers) if family.has_experts else {}),
        **_scales(family, raw, hidden, head_dim),
    )


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


def _query_growth(raw: Raw, rope: RopeConfig, max_positions: int) -> QueryGrowthConfig | None:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    beta, span = scaling.get("llama_4_scaling_beta"), rope.original_max_positions
    if beta is None:
        return None
    if max_positions > MAX_SPANS * span:
        raise ModelError(f"config.json: original_max_position_embeddings {span} is too small for its context")
    return QueryGrowthConfig(float(beta), span)


def _activation(family: Family, raw: Raw) -> str:
    name = raw.get(family.activation_key, family.default_activation)
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _experts(family: Family, raw: Raw, layers: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that only mixtures of experts have."""
    dense = set(raw.get("mlp_only_layers") or ())
    step = int(raw.get("decoder_sparse_step") or 1)
    count, used = int(raw.get("num_local_experts") or raw["num_experts"]), int(raw["num_experts_per_tok"])
    if not 1 <= used <= count:
        raise ModelError(f"config.json: num_experts_per_tok is {used}, and there are {count} experts")
    return {
        "num_experts": count,
        "experts_per_token": used,
        "expert_size": int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
        "normalize_experts": family.always_normalizes_experts or bool(raw.get("norm_topk_prob", False)),
        "sparse_layers": tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    }


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
    window = raw.get("sliding_window")
    if not window or (family.window_switch and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = raw.get("layer_types") if family.reads_layer_types else None
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else family.windowed(raw, layers)
    if len(windowed) != layers:
        raise ModelError(f"config.json: layer_types has {len(windowed)} entries for {layers} layers")
    return tuple(int(window) if has_window else None for has_window in windowed)
