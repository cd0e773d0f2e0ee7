"""The model families: what each does unlike Llama, where its `config.json` does not say so.

A new family is one entry of `FAMILIES`. The names of its tensors stand in `soothsay.model.tensor_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from soothsay.config import ModelConfig
from soothsay.errors import ModelError
from soothsay.model import gemma4_fields

Raw = Mapping[str, Any]
"""The content of a `config.json`."""


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


def rotated_layers(raw: Raw, layers: int) -> list[bool]:
    """All but `unrotated_layers`."""
    return [not unrotated for unrotated in unrotated_layers(raw, layers)]


def last_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers from `max_window_layers` on have a sliding window."""
    return [i >= int(raw.get("max_window_layers", 28)) for i in range(layers)]


def all_or_none(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """All layers, unless `position_embedding_type` is "rope"."""
    return [raw.get("position_embedding_type") != "rope"] * len(windows)


def unchanged(raw: Raw) -> Raw:
    """The file's keys are the usual ones."""
    return raw


def as_parsed(raw: Raw, config: ModelConfig) -> ModelConfig:
    """The family has no fields of its own."""
    return config


def dense_hybrid(raw: Raw) -> Raw:
    """A hybrid's configuration without recurrent layers and experts, as Granite 4's dense models have it."""
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"]
    has_experts = raw.get("num_local_experts", 8) or not raw["shared_intermediate_size"]
    if has_experts or not set(kinds) <= {"attention", "full_attention"}:
        raise ModelError("config.json: a hybrid with recurrent layers or experts is not supported")
    return {**raw, "intermediate_size": raw["shared_intermediate_size"]}


def softmax_groups(raw: Raw) -> Raw:
    """DeepSeek-V2's configuration, where `topk_method` says whether groups count."""
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method {method!r} is not supported in DeepSeek-V2")
    if raw.get("norm_topk_prob"):
        raise ModelError("config.json: norm_topk_prob is not supported in DeepSeek-V2")
    return {**raw, "n_group": 1, "topk_group": 1} if method == "greedy" else raw


def listed_experts(raw: Raw) -> Raw:
    """A configuration whose `mlp_layer_types` takes the place of `first_k_dense_replace`."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return raw
    if len(kinds) != int(raw["num_hidden_layers"]):
        raise ModelError(
            f"config.json: mlp_layer_types has {len(kinds)} entries, one for each layer is needed"
        )
    if unknown := set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"config.json: mlp_layer_types has {min(unknown)!r}, which is not dense or sparse")
    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return {**raw, "mlp_only_layers": dense, "first_k_dense_replace": 0}


def rotary_share(raw: Raw) -> Raw:
    """MiniMax-M2's configuration, where `rotary_dim` is the number of dimensions that rotate."""
    if "rotary_dim" not in raw:
        return raw
    return {**raw, "partial_rotary_factor": int(raw["rotary_dim"]) / int(raw["head_dim"])}


def llama4(raw: Raw) -> Raw:
    """Llama 4's configuration, where `moe_layers` have experts, and other layers a size of their own."""
    layers, step = int(raw["num_hidden_layers"]), int(raw.get("interleave_moe_layer_step") or 1)
    sparse = raw.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    return {
        **raw,
        "num_experts_per_tok": raw.get("num_experts_per_tok", 1),
        "n_shared_experts": 1,
        "moe_intermediate_size": raw["intermediate_size"],
        "intermediate_size": raw.get("intermediate_size_mlp", 16_384),
        "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse],
    }


def bounded_at_7(raw: Raw) -> Raw:
    """A configuration of gpt-oss, whose activation has the published constants."""
    for key, value in {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}.items():
        if raw.get(key, value) != value:
            raise ModelError(f"config.json: {key} {raw[key]!r:.80} is not supported, only {value}")
    return raw


def with_layer_types(raw: Raw) -> Raw:
    """A configuration with `layer_types`. Without, each `full_attention_interval`-th layer is full."""
    interval, layers = int(raw.get("full_attention_interval") or 4), int(raw["num_hidden_layers"])
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return {"layer_types": kinds, **raw}


@dataclass(frozen=True)
class Family:
    """What a family does unlike Llama, where its `config.json` does not say so."""

    qkv_bias_only: bool = False
    """Queries, keys and values have a bias whatever the file says, and attention's output has none."""

    qk_norm: bool = False
    reads_qk_norm: bool = False
    """Queries and keys are normed if the file says so, by `use_qk_norm`."""

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

    tunes_temperature: bool = False
    """Queries of layers that do not rotate grow with the position, by `attn_scale` and `floor_scale`. Heads
    of the others are normed, by `use_qk_norm` (Llama 4)."""

    chunked: bool = False
    """Windows are chunks of `attention_chunk_size` (Llama 4)."""

    default_logit_scale: float = 1.0
    has_multipliers: bool = False
    """Files scale embeddings, residuals, attention and logits, by Granite's keys."""

    has_experts: bool = False
    always_normalizes_experts: bool = False
    """The weights of the chosen experts add up to 1 whatever the file says."""

    routes_by_sigmoid: bool = False
    """Experts are chosen as in DeepSeek-V3: by sigmoids with a correction, from the best groups."""

    biased_experts: bool = False
    """Experts and their router have biases."""

    scales_expert_inputs: bool = False
    """Experts read a row times its weight, which is the sigmoid of its score (Llama 4)."""

    clipped_swiglu: bool = False
    """Feed-forward parts are gated by gpt-oss's activation."""

    sinks: bool = False
    """Each head has a sink."""

    latent: bool = False
    """Attention runs over latent states, as in DeepSeek-V2."""

    has_states: bool = False
    """Layers of the type "linear_attention" keep a state, and attention has gates, as in Qwen3-Next."""

    windowed: Callable[[Raw, int], Sequence[bool]] = no_layer
    """For each layer, whether it has a sliding window, if the file has a `sliding_window`."""

    reads_layer_types: bool = True
    """Where the file has `layer_types`, they take the place of `windowed`."""

    window_switch: bool = False
    """A `sliding_window` counts only if `use_sliding_window` is true."""

    rewritten: Callable[[Raw], Raw] = unchanged
    """The file with the usual keys. Raises `ModelError` for a model that is not supported."""

    finished: Callable[[Raw, ModelConfig], ModelConfig] = as_parsed
    """The configuration with fields that few families have. Raises `ModelError`."""

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

_GEMMA4 = Family(
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_tied=True,
    post_norms=True,
    scaled_embedding=True,
    qk_norm=True,
    local_rope=True,
    rewritten=gemma4_fields.with_layer_types,
    finished=gemma4_fields.finished,
    defaults=gemma4_fields.DEFAULTS,
)

_QWEN2 = Family(qkv_bias_only=True, windowed=last_layers, window_switch=True)
_QWEN2_VL = replace(_QWEN2, default_theta=1e6, defaults={"max_window_layers": 80})
_QWEN3 = Family(qk_norm=True, windowed=last_layers, window_switch=True)
_QWEN3_MOE = Family(
    qk_norm=True, windowed=every_layer, reads_layer_types=False, window_switch=True, has_experts=True
)

_QWEN3_NEXT = Family(
    qk_norm=True,
    zero_centred_norms=True,
    rotates_share=0.25,
    has_states=True,
    has_experts=True,
    rewritten=with_layer_types,
    defaults={  # which files may leave out, as those of transformers do
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
_QWEN3_5 = replace(_QWEN3_NEXT, has_experts=False)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    always_normalizes_experts=True,
    defaults={**_QWEN3_NEXT.defaults, "intermediate_size": 512},  # no layer is dense
)

_DEEPSEEK_V3 = Family(
    latent=True,
    has_experts=True,
    routes_by_sigmoid=True,
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True},
)

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
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(_QWEN3_MOE, default_theta=5e5, windowed=no_layer),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next_gguf": _QWEN3_NEXT,  # our own: queries, keys, values and gates are matrices of their own
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
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
    "glm4_moe": Family(
        o_bias=False,
        reads_qk_norm=True,
        rotates_share=0.5,
        default_norm_eps=1e-5,
        has_experts=True,
        routes_by_sigmoid=True,
        defaults={"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    ),
    "deepseek_v2": Family(
        latent=True, has_experts=True, rewritten=softmax_groups, defaults={"n_shared_experts": 2}
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        default_norm_eps=1e-5,
        rewritten=listed_experts,
        defaults={**_DEEPSEEK_V3.defaults, "first_k_dense_replace": 1},
    ),
    "gpt_oss": Family(
        default_attention_bias=True,
        default_theta=1.5e5,
        default_norm_eps=1e-5,
        windowed=even_layers,
        has_experts=True,
        always_normalizes_experts=True,  # the softmax of the chosen scores alone
        biased_experts=True,
        clipped_swiglu=True,
        sinks=True,
        rewritten=bounded_at_7,
        defaults={"head_dim": 64, "sliding_window": 128},
    ),
    "llama4_text": Family(
        default_theta=5e5,
        default_norm_eps=1e-5,
        rotates_neighbours=True,
        unrotated=listed_layers,
        chunked=True,
        windowed=rotated_layers,
        tunes_temperature=True,
        reads_qk_norm=True,
        has_experts=True,
        scales_expert_inputs=True,
        rewritten=llama4,
        defaults={"head_dim": 128, "attention_chunk_size": 8192, "num_local_experts": 16},
    ),
    "minimax_m2": Family(
        qk_norm=True,
        qk_norm_over_heads=True,
        default_theta=5e6,
        rotates_share=1.0,
        has_experts=True,
        routes_by_sigmoid=True,
        always_normalizes_experts=True,
        rewritten=rotary_share,
        defaults={"head_dim": 128},
    ),
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
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, defaults=gemma4_fields.UNIFIED_DEFAULTS),
}

_SPARSE = "its attention reads keys that an indexer chooses"
_BLOCKS = "its attention reads chosen blocks of keys"
_RECURRENT = "it has Mamba layers"
UNSUPPORTED: dict[str, str] = {  # by `model_type`
    "bamba": _RECURRENT,
    "bert": "it is an encoder",
    "deepseek_ref": "it is DeepSeek-V4 in its authors' own format",
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "its attention runs over compressed keys, and its layers have several residual streams",
    "falcon_h1": _RECURRENT,
    "gemma3n": "its residual stream is predicted and corrected (AltUp)",
    "gemma3n_text": "its residual stream is predicted and corrected (AltUp)",
    "glm_moe_dsa": _SPARSE,
    "jamba": _RECURRENT,
    "kimi_linear": "it has layers of Kimi Delta Attention",
    "lfm2": "it has short convolutions",
    "lfm2_moe": "it has short convolutions",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "mimo": "it has not been tried: its code comes with its weights",
    "mimo_v2_flash": "its heads of keys and of values differ in size",
    "minimax_m3": _BLOCKS,
    "minimax_m3_vl": _BLOCKS,
    "nemotron-nas": "each of its blocks has a shape of its own",
    "nemotron_h": _RECURRENT,
    "rwkv7": "it has no attention",
    "step3p7": "its attention has a gate for each head",
    "t5": "it has an encoder",
    "whisper": "it reads speech",
}
"""Why some families do not run that people may try."""
