"""The values that fields of a config.json may have: the one home of these bounds, for models and drafters.

A configuration comes from strangers. What passes here has the right types, and numbers with which sizes
can be computed. Whether the weights have these sizes is checked later, by `soothsay.model.load`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from soothsay.errors import ModelError

MAX_POSITIONS = 2**31 - 1
"""Limit of a context in tokens: positions are 32-bit integers."""

MAX_LAYERS = 10_000
"""Limit of decoder blocks. Published models have up to 130."""


class Rule(Protocol):
    """What a field may hold."""

    @property
    def wanted(self) -> str:
        """What it may hold, for people."""

    def accept(self, value: Any) -> Any:
        """The value as the program uses it. Raises `ValueError` if it is refused."""


@dataclass(frozen=True)
class Whole:
    """A whole number. It may be written with a fraction of zero, such as 8192.0."""

    least: int
    most: int

    @property
    def wanted(self) -> str:
        """See `Rule`."""
        return f"a whole number from {self.least:,} to {self.most:,}"

    def accept(self, value: Any) -> int:
        """See `Rule`."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Real:
    """A finite number."""

    least: float
    most: float

    @property
    def wanted(self) -> str:
        """See `Rule`."""
        return f"a number from {self.least:g} to {self.most:g}"

    def accept(self, value: Any) -> float:
        """See `Rule`."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError
        if not self.least <= value <= self.most:  # false for NaN
            raise ValueError
        return value


@dataclass(frozen=True)
class OneType:
    """A value of one type."""

    kind: type
    wanted: str

    def accept(self, value: Any) -> Any:
        """See `Rule`."""
        if not isinstance(value, self.kind):
            raise ValueError
        return value


@dataclass(frozen=True)
class Each:
    """A list whose entries follow a rule."""

    rule: Rule

    @property
    def wanted(self) -> str:
        """See `Rule`."""
        return f"a list of at most {MAX_LAYERS:,} entries, each {self.rule.wanted}"

    def accept(self, value: Any) -> list[Any]:
        """See `Rule`."""
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise ValueError
        return [self.rule.accept(entry) for entry in value]


@dataclass(frozen=True)
class Either:
    """A value that follows one of two rules."""

    first: Rule
    second: Rule

    @property
    def wanted(self) -> str:
        """See `Rule`."""
        return f"{self.first.wanted}, or {self.second.wanted}"

    def accept(self, value: Any) -> Any:
        """See `Rule`."""
        try:
            return self.first.accept(value)
        except ValueError:
            return self.second.accept(value)


@dataclass(frozen=True)
class Equal:
    """A value, or a list for the layers in which all are equal. It becomes one value."""

    rule: Rule

    @property
    def wanted(self) -> str:
        """See `Rule`."""
        return f"{self.rule.wanted}, the same for all layers"

    def accept(self, value: Any) -> Any:
        """See `Rule`."""
        if not isinstance(value, list):
            return self.rule.accept(value)
        if not 1 <= len(value) <= MAX_LAYERS or any(each != value[0] for each in value):
            raise ValueError
        return self.rule.accept(value[0])


FLAG = OneType(bool, "true or false")
TEXT = OneType(str, "a text")
_SIZE = Whole(1, 2**22)
_LAYER = Whole(0, MAX_LAYERS)
_POSITIONS = Whole(1, MAX_POSITIONS)
_TOKEN = Whole(-1, 2**31)
_POSITIVE = Real(1e-6, 1e6)
_BASE = Real(2, 1e15)

_NAMES: tuple[tuple[Rule, str], ...] = (
    (
        TEXT,
        "model_type hidden_act hidden_activation position_embedding_type topk_method "
        "hybrid_override_pattern mlp_hidden_act mamba_hidden_act rope_type type soothsay_method "
        "speculators_model_type",
    ),
    (Whole(1, 2**24), "vocab_size draft_vocab_size num_centroids centroid_intermediate_top_k"),
    (
        _SIZE,
        "hidden_size moe_intermediate_size intermediate_size_mlp mamba_d_ssm moe_latent_size laurel_rank "
        "block_ff_dim block_multiple_of target_hidden_size block_size conv_kernel_size conv_group_size "
        "selector_rank selector_top_k xpress_rank speculative_tokens backbone_hidden_size",
    ),
    (Equal(_SIZE), "intermediate_size"),
    (
        Whole(1, MAX_LAYERS),
        "num_hidden_layers no_rope_layer_interval moe_layer_freq interleave_moe_layer_step "
        "full_attention_interval target_layers num_target_layers",
    ),
    (
        Whole(1, 65_536),
        "num_attention_heads num_key_value_heads num_experts n_routed_experts n_group topk_group "
        "num_global_key_value_heads top_k_experts kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_num_heads mamba_head_dim n_groups "
        "ssm_state_size num_heads",
    ),
    (Whole(2, 65_536), "head_dim global_head_dim qk_rope_head_dim rotary_dim"),
    (_POSITIONS, "max_position_embeddings attention_chunk_size floor_scale original_max_position_embeddings"),
    (Real(0, 1), "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon partial_rotary_factor"),
    (
        FLAG,
        "use_qk_norm attention_bias mlp_bias tie_word_embeddings use_sliding_window "
        "attn_temperature_tuning norm_topk_prob attention_k_eq_v use_double_wide_mlp enable_moe_block "
        "rope_interleave linear_heads_tiled mamba_rms_norm mamba_norm_before_gate mamba_conv_bias "
        "use_bias attention_out_bias mamba_proj_bias projectors_bias use_conv_bias altup_correct_scale "
        "conv_bias tie_embedding block_auto_adjust_ff_dim use_expert_bias truncate use_aux_hidden_state "
        "norm_before_residual norm_before_fc fc_norm norm_output original_lm_head zero_first "
        "parallel_drafting is_causal causal sliding_window_non_causal sample_from_anchor "
        "use_ordered_embeddings",
    ),
    (Either(FLAG, TEXT), "use_bidirectional_attention"),
    (Each(TEXT), "architectures layer_types layers_block_type mlp_layer_types"),
    (
        _POSITIVE,
        "logit_scale query_pre_attn_scalar embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling attn_logit_softcapping final_logit_softcapping routed_scaling_factor swiglu_limit "
        "swiglu_alpha lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
        "ssm_in_multiplier ssm_out_multiplier block_ffn_dim_multiplier factor low_freq_factor "
        "high_freq_factor beta_fast beta_slow attention_factor input_embedding_scale output_multiplier",
    ),
    (Whole(0, MAX_POSITIONS), "sliding_window"),
    (Either(_LAYER, TEXT), "sliding_window_pattern"),
    (Real(0, 1e3), "attn_scale mscale mscale_all_dim llama_4_scaling_beta"),
    (
        _LAYER,
        "max_window_layers first_k_dense_replace decoder_sparse_step num_kv_shared_layers "
        "num_dense_layers num_layers num_nextn_predict_layers",
    ),
    (Each(Whole(0, 1)), "no_rope_layers"),
    (Whole(0, 65_536), "num_local_experts num_experts_per_tok markov_rank"),
    (Whole(0, 1024), "n_shared_experts"),
    (
        Whole(0, 2**22),
        "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (Each(_LAYER), "mlp_only_layers moe_layers full_attn_idxs taps aux_hidden_state_layer_ids"),
    (Whole(0, 2**16), "hidden_size_per_layer_input"),
    (Whole(0, 2**24), "vocab_size_per_layer_input"),
    (Whole(2, 64), "linear_conv_kernel_dim mamba_d_conv conv_kernel altup_num_inputs conv_L_cache"),
    (Whole(1, 64), "mamba_expand"),
    (Each(_POSITIVE), "ssm_multipliers mlp_multipliers short_factor long_factor"),
    (Whole(0, 63), "altup_active_idx"),
    (Each(Real(0, 0.9999)), "activation_sparsity_pattern"),
    (_BASE, "rope_theta rope_local_base_freq"),
    (Whole(1, 1024), "size"),
    (Each(Whole(-1, MAX_LAYERS)), "eagle_aux_hidden_state_layer_ids target_layer_ids"),
    (_TOKEN, "mask_token_id ptd_token_id pard_token"),
)
"""The keys that follow each rule."""

FIELDS: Mapping[str, Rule] = {name: rule for rule, names in _NAMES for name in names.split()}
"""Rules by key. A key that is not here is not read, or is checked where it is read."""

PARTS = frozenset(
    {
        "text_config",
        "rope_scaling",
        "rope_parameters",
        "full_attention",
        "sliding_attention",
        "transformer_layer_config",
        "block",
        "eagle_config",
        "dflash_config",
        "dspark_config",
        "soothsay",
    }
)
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


def _refusal(name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(
        f"{name} is {reprlib.repr(value)}, and should be {wanted}; the file is damaged, or of a model that "
        "soothsay does not read"
    )
