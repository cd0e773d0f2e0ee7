"""`Family`: what the models of one `model_type` do unlike Llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from soothsay.config import ModelConfig
from soothsay.model.families.layers import Raw, no_layer
from soothsay.model.families.rewrites import as_parsed, unchanged


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

    correction_name: str = "e_score_correction_bias"
    """The tensor of these corrections."""

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

    has_convolutions: bool = False
    """Layers of the type "conv" read the last tokens by a short convolution (LFM2)."""

    has_state_spaces: bool = False
    """Layers of the type "linear_attention" are Mamba-2's (Granite 4)."""

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
