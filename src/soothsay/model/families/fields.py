"""The values that fields of a config.json may have: the one home of these bounds, for models and drafters.

A configuration comes from strangers. What passes here has the right types, and numbers with which sizes
can be computed. Whether the weights have these sizes is checked later, by `soothsay.model.weights.load`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from soothsay.errors import ModelError

MAX_POSITIONS = 2**31 - 1
"""Limit of a context in tokens: positions are 32-bit integers."""

MAX_LAYERS = 10_000
"""Limit of decoder blocks. Published models have up to 130."""


@dataclass(frozen=True)
class Rule:
    """What a field may hold."""

    wanted: str
    """What it may hold, for people."""

    accept: Callable[[Any], Any]
    """Returns the value as the program uses it. Raises `ValueError` if it is refused."""


def whole(least: int, most: int) -> Rule:
    """A whole number. It may be written with a fraction of zero, such as 8192.0."""

    def accept(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return value

    return Rule(f"a whole number from {least:,} to {most:,}", accept)


def real(least: float, most: float) -> Rule:
    """A finite number."""

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most  # false for NaN

    return _where(fits, f"a number from {least:g} to {most:g}")


def _where(fits: Callable[[Any], bool], wanted: str) -> Rule:
    def accept(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return value

    return Rule(wanted, accept)


def each(rule: Rule) -> Rule:
    """A list whose entries follow a rule."""

    def accept(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise ValueError
        return [rule.accept(entry) for entry in value]

    return Rule(f"a list of at most {MAX_LAYERS:,} entries, each {rule.wanted}", accept)


def _either(first: Rule, second: Rule) -> Rule:
    """A value that follows one of two rules."""

    def accept(value: Any) -> Any:
        try:
            return first.accept(value)
        except ValueError:
            return second.accept(value)

    return Rule(f"{first.wanted}, or {second.wanted}", accept)


def _equal(rule: Rule) -> Rule:
    """A value, or a list for the layers in which all are equal. It becomes one value."""

    def accept(value: Any) -> Any:
        if not isinstance(value, list):
            return rule.accept(value)
        if not 1 <= len(value) <= MAX_LAYERS or any(one != value[0] for one in value):
            raise ValueError
        return rule.accept(value[0])

    return Rule(f"{rule.wanted}, the same for all layers", accept)


FLAG = _where(lambda value: isinstance(value, bool), "true or false")
TEXT = _where(lambda value: isinstance(value, str), "a text")
_SIZE = whole(1, 2**22)
_LAYER = whole(0, MAX_LAYERS)
_POSITIONS = whole(1, MAX_POSITIONS)
_TOKEN = whole(-1, 2**31)
_POSITIVE = real(1e-6, 1e6)
_BASE = real(2, 1e15)

_NAMES: dict[Rule, str] = {
    TEXT: (
        "model_type hidden_act hidden_activation position_embedding_type topk_method "
        "hybrid_override_pattern mlp_hidden_act mamba_hidden_act rope_type type soothsay_method "
        "speculators_model_type activation_function activation feed_forward_proj moe_router_activation_func "
        "score_function"
    ),
    whole(1, 2**24): "vocab_size draft_vocab_size num_centroids centroid_intermediate_top_k",
    _SIZE: (
        "hidden_size intermediate_size_mlp mamba_d_ssm mamba_d_inner moe_latent_size laurel_rank "
        "block_ff_dim block_multiple_of target_hidden_size block_size conv_kernel_size conv_group_size "
        "selector_rank selector_top_k xpress_rank speculative_tokens backbone_hidden_size n_embd n_inner "
        "ffn_dim ffn_hidden_size word_embed_proj_dim dim_model_base d_model d_ff encoder_ffn_dim "
        "decoder_ffn_dim"
    ),
    _equal(_SIZE): "intermediate_size moe_intermediate_size",
    whole(1, MAX_LAYERS): (
        "num_hidden_layers no_rope_layer_interval moe_layer_freq interleave_moe_layer_step "
        "moe_layer_interval full_attention_interval global_attn_every_n_layers target_layers "
        "num_target_layers n_layer num_decoder_layers encoder_layers decoder_layers"
    ),
    whole(1, 65_536): (
        "num_attention_heads num_key_value_heads num_experts n_routed_experts n_group topk_group "
        "num_global_key_value_heads top_k_experts kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_num_heads mamba_head_dim n_groups "
        "ssm_state_size state_size num_heads n_head num_kv_heads encoder_attention_heads "
        "decoder_attention_heads num_expert_group linear_num_heads expert_layer_period attn_layer_period"
    ),
    whole(2, 65_536): "head_dim global_head_dim qk_rope_head_dim rotary_dim d_kv linear_head_dim",
    _POSITIONS: (
        "max_position_embeddings attention_chunk_size floor_scale original_max_position_embeddings "
        "n_positions model_max_length index_topk"
    ),
    real(0, 1): (
        "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon norm_epsilon partial_rotary_factor "
        "rotary_pct router_jitter_noise mixer_rms_eps"
    ),
    FLAG: (
        "use_qk_norm attention_bias mlp_bias tie_word_embeddings use_sliding_window "
        "attn_temperature_tuning norm_topk_prob attention_k_eq_v use_double_wide_mlp enable_moe_block "
        "rope_interleave linear_heads_tiled mamba_rms_norm mamba_norm_before_gate mamba_conv_bias "
        "use_bias attention_out_bias mamba_proj_bias projectors_bias use_conv_bias altup_correct_scale "
        "conv_bias tie_embedding block_auto_adjust_ff_dim use_expert_bias truncate use_aux_hidden_state "
        "norm_before_residual norm_before_fc fc_norm norm_output original_lm_head zero_first "
        "parallel_drafting is_causal causal sliding_window_non_causal sample_from_anchor "
        "use_ordered_embeddings use_qkv_bias qkv_bias qkv_by_head qk_layernorm use_parallel_residual bias "
        "parallel_attn multi_query new_decoder_architecture alibi do_layer_norm_before enable_bias "
        "layer_norm_elementwise_affine scale_attn_weights scale_attn_by_inverse_layer_idx "
        "add_cross_attention scale_decoder_outputs mup_enabled scale_embedding "
        "share_encoder_decoder_embeddings lm_head_bias moe_renormalize mla_use_nope "
        "use_qkv_bias norm_head multi_gate norm_softmax"
    ),
    _either(FLAG, TEXT): "use_bidirectional_attention",
    each(TEXT): "architectures layer_types layers_block_type mlp_layer_types",
    _POSITIVE: (
        "logit_scale query_pre_attn_scalar embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling attn_logit_softcapping final_logit_softcapping routed_scaling_factor swiglu_limit "
        "swiglu_alpha lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
        "ssm_in_multiplier ssm_out_multiplier block_ffn_dim_multiplier factor low_freq_factor "
        "high_freq_factor beta_fast beta_slow attention_factor input_embedding_scale output_multiplier alpha "
        "clip_qkv scale_emb scale_depth router_scaling_factor route_scale short_mscale long_mscale"
    ),
    whole(0, MAX_POSITIONS): "sliding_window",
    _either(_LAYER, TEXT): "sliding_window_pattern",
    _either(whole(1, 65_536), _where(lambda value: value == "auto", "auto")): "mamba_dt_rank time_step_rank",
    real(0, 1e3): "attn_scale mscale mscale_all_dim llama_4_scaling_beta",
    _LAYER: (
        "moe_layer_start_index max_window_layers first_k_dense_replace decoder_sparse_step "
        "expert_layer_offset attn_layer_offset "
        "num_kv_shared_layers num_dense_layers num_layers num_nextn_predict_layers num_ln_in_parallel_attn"
    ),
    each(whole(0, 1)): "no_rope_layers",
    whole(0, 65_536): (
        "num_local_experts num_experts_per_tok num_experts_per_token moe_num_experts moe_k markov_rank"
    ),
    _equal(whole(1, 65_536)): "moe_topk",
    whole(0, 1024): "n_shared_experts num_shared_experts moe_num_shared_experts",
    whole(-1, MAX_LAYERS): "moe_layer_end_index",
    whole(0, 2**22): (
        "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"
    ),
    each(_LAYER): (
        "attn_layer_indices mlp_only_layers moe_layers full_attn_idxs full_attn_layers taps "
        "aux_hidden_state_layer_ids"
    ),
    whole(0, 2**16): "hidden_size_per_layer_input",
    whole(0, 2**24): "vocab_size_per_layer_input",
    whole(2, 64): (
        "linear_conv_kernel_dim short_conv_kernel_size mamba_d_conv conv_kernel altup_num_inputs conv_L_cache"
    ),
    whole(1, 64): "mamba_expand expand",
    each(_POSITIVE): "ssm_multipliers mlp_multipliers short_factor long_factor",
    whole(0, 63): "altup_active_idx",
    each(real(0, 0.9999)): "activation_sparsity_pattern",
    _BASE: "rope_theta rope_local_base_freq rotary_emb_base",
    whole(1, 1024): "size",
    whole(2, 2**16): "relative_attention_num_buckets relative_attention_max_distance",
    each(whole(-1, MAX_LAYERS)): "eagle_aux_hidden_state_layer_ids target_layer_ids",
    _TOKEN: "mask_token_id ptd_token_id pard_token decoder_start_token_id pad_token_id forced_bos_token_id",
}
"""The keys that follow each rule."""

FIELDS: Mapping[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
"""Rules by key. A key that is not here is not read, or is checked where it is read."""

_PARTS = (
    "text_config rope_scaling rope_parameters full_attention sliding_attention transformer_layer_config "
    "block eagle_config dflash_config dspark_config soothsay linear_attn_config"
)
PARTS = frozenset(_PARTS.split())
"""Keys whose values are objects with fields of these names."""


def checked_fields(raw: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Check a configuration and the parts in it that are read.

    Args:
        raw: the content of a config.json, nested at most as deep as `read_json_object` allows.
        where: names the file in messages.

    Returns:
        The configuration without the fields that are null. Whole numbers are `int`.

    Raises `ModelError` for a field with a wrong type, or out of its range.
    """
    checked: dict[str, Any] = {}
    for key, value in raw.items():
        if value is None:
            continue
        name = f"{where}: {key}"
        if key in PARTS:
            if not isinstance(value, Mapping):
                raise _refusal(name, value, "an object")
            value = checked_fields(value, name)
        elif key in FIELDS:
            try:
                value = FIELDS[key].accept(value)
            except ValueError:
                raise _refusal(name, value, FIELDS[key].wanted) from None
        checked[key] = value
    return checked


def require(condition: object, message: str) -> None:
    """Raise `ModelError` with a message about config.json unless a condition holds."""
    if not condition:
        raise ModelError(f"config.json: {message}")


def require_only(raw: Mapping[str, Any], **supported: Any) -> None:
    """Raise `ModelError` if a field has another value than the one that is supported."""
    for key, only in supported.items():
        require(raw.get(key, only) == only, f"{key} {raw.get(key)!r:.40} is not supported, only {only}")


def usual_keys(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields that a file has under other keys, by the usual ones. `keys`: from those to these."""
    return {usual: raw[own] for own, usual in keys.items() if own in raw}


def _refusal(name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(
        f"{name} is {reprlib.repr(value)}, and should be {wanted}; the file is damaged, or of a model that "
        "soothsay does not read"
    )
