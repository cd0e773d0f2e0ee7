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

FIELDS: Mapping[str, Rule] = {
    "model_type": TEXT,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "vocab_size": Whole(1, 2**24),
    "hidden_size": _SIZE,
    "intermediate_size": Equal(_SIZE),
    "num_hidden_layers": Whole(1, MAX_LAYERS),
    "num_attention_heads": Whole(1, 65_536),
    "num_key_value_heads": Whole(1, 65_536),
    "head_dim": Whole(2, 65_536),
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": Real(0, 1),
    "layer_norm_eps": Real(0, 1),
    "norm_eps": Real(0, 1),
    "use_qk_norm": FLAG,
    "use_bidirectional_attention": Either(FLAG, TEXT),
    "architectures": Each(TEXT),
    "logit_scale": _POSITIVE,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "tie_word_embeddings": FLAG,
    "query_pre_attn_scalar": _POSITIVE,
    "embedding_multiplier": _POSITIVE,
    "residual_multiplier": _POSITIVE,
    "attention_multiplier": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "sliding_window": Whole(0, MAX_POSITIONS),
    "use_sliding_window": FLAG,
    "sliding_window_pattern": Either(_LAYER, TEXT),
    "attention_chunk_size": _POSITIONS,
    "attn_temperature_tuning": FLAG,
    "attn_scale": Real(0, 1e3),
    "floor_scale": _POSITIONS,
    "max_window_layers": _LAYER,
    "layer_types": Each(TEXT),
    "layers_block_type": Each(TEXT),
    "position_embedding_type": TEXT,
    "no_rope_layers": Each(Whole(0, 1)),
    "no_rope_layer_interval": Whole(1, MAX_LAYERS),
    # mixtures of experts
    "num_local_experts": Whole(0, 65_536),
    "num_experts": Whole(1, 65_536),
    "n_routed_experts": Whole(1, 65_536),
    "n_shared_experts": Whole(0, 1024),
    "n_group": Whole(1, 65_536),
    "topk_group": Whole(1, 65_536),
    "routed_scaling_factor": _POSITIVE,
    "first_k_dense_replace": _LAYER,
    "num_experts_per_tok": Whole(0, 65_536),
    "shared_intermediate_size": Whole(0, 2**22),
    "moe_intermediate_size": _SIZE,
    "norm_topk_prob": FLAG,
    "mlp_only_layers": Each(_LAYER),
    "decoder_sparse_step": _LAYER,
    "moe_layer_freq": Whole(1, MAX_LAYERS),
    "mlp_layer_types": Each(TEXT),
    "topk_method": TEXT,
    "swiglu_limit": _POSITIVE,
    "intermediate_size_mlp": _SIZE,
    "interleave_moe_layer_step": Whole(1, MAX_LAYERS),
    "moe_layers": Each(_LAYER),
    "swiglu_alpha": _POSITIVE,
    # Gemma 4
    "global_head_dim": Whole(2, 65_536),
    "num_global_key_value_heads": Whole(1, 65_536),
    "attention_k_eq_v": FLAG,
    "num_kv_shared_layers": _LAYER,
    "use_double_wide_mlp": FLAG,
    "hidden_size_per_layer_input": Whole(0, 2**16),
    "vocab_size_per_layer_input": Whole(0, 2**24),
    "enable_moe_block": FLAG,
    "top_k_experts": Whole(1, 65_536),
    # latent attention
    "kv_lora_rank": Whole(1, 65_536),
    "q_lora_rank": Whole(1, 65_536),
    "qk_rope_head_dim": Whole(2, 65_536),
    "qk_nope_head_dim": Whole(1, 65_536),
    "v_head_dim": Whole(1, 65_536),
    "rope_interleave": FLAG,
    # layers with states
    "full_attention_interval": Whole(1, MAX_LAYERS),
    "linear_conv_kernel_dim": Whole(2, 64),
    "linear_heads_tiled": FLAG,  # our own: the order of heads in GGUF files
    "linear_key_head_dim": Whole(1, 65_536),
    "linear_value_head_dim": Whole(1, 65_536),
    "linear_num_key_heads": Whole(1, 65_536),
    "linear_num_value_heads": Whole(1, 65_536),
    "shared_expert_intermediate_size": Whole(0, 2**22),
    "mamba_n_heads": Whole(1, 65_536),
    "mamba_n_groups": Whole(1, 65_536),
    "mamba_d_state": Whole(1, 65_536),
    "mamba_d_conv": Whole(2, 64),
    "mamba_expand": Whole(1, 64),
    "mamba_d_ssm": _SIZE,
    "mamba_rms_norm": FLAG,
    "mamba_norm_before_gate": FLAG,
    "mamba_conv_bias": FLAG,
    "use_bias": FLAG,
    "attention_out_bias": FLAG,
    "mamba_proj_bias": FLAG,
    # Falcon-H1
    "projectors_bias": FLAG,
    "lm_head_multiplier": _POSITIVE,
    "key_multiplier": _POSITIVE,
    "attention_in_multiplier": _POSITIVE,
    "attention_out_multiplier": _POSITIVE,
    "ssm_in_multiplier": _POSITIVE,
    "ssm_out_multiplier": _POSITIVE,
    "ssm_multipliers": Each(_POSITIVE),
    "mlp_multipliers": Each(_POSITIVE),
    # Nemotron-H
    "hybrid_override_pattern": TEXT,
    "mlp_hidden_act": TEXT,
    "mamba_hidden_act": TEXT,
    "layer_norm_epsilon": Real(0, 1),
    "mamba_num_heads": Whole(1, 65_536),
    "mamba_head_dim": Whole(1, 65_536),
    "n_groups": Whole(1, 65_536),
    "ssm_state_size": Whole(1, 65_536),
    "conv_kernel": Whole(2, 64),
    "use_conv_bias": FLAG,
    "moe_shared_expert_intermediate_size": Whole(0, 2**22),
    "moe_latent_size": _SIZE,
    # Gemma 3n
    "altup_num_inputs": Whole(2, 64),
    "altup_active_idx": Whole(0, 63),
    "altup_correct_scale": FLAG,
    "laurel_rank": _SIZE,
    "activation_sparsity_pattern": Each(Real(0, 0.9999)),
    # short convolutions
    "conv_bias": FLAG,
    "conv_L_cache": Whole(2, 64),
    "full_attn_idxs": Each(_LAYER),
    "tie_embedding": FLAG,
    "block_ff_dim": _SIZE,
    "block_multiple_of": _SIZE,
    "block_ffn_dim_multiplier": _POSITIVE,
    "block_auto_adjust_ff_dim": FLAG,
    "num_dense_layers": _LAYER,
    "use_expert_bias": FLAG,
    # rotary positions
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "partial_rotary_factor": Real(0, 1),
    "rotary_dim": Whole(2, 65_536),
    "factor": _POSITIVE,
    "original_max_position_embeddings": _POSITIONS,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "attention_factor": _POSITIVE,
    "mscale": Real(0, 1e3),
    "mscale_all_dim": Real(0, 1e3),
    "truncate": FLAG,
    "llama_4_scaling_beta": Real(0, 1e3),
    "short_factor": Each(_POSITIVE),
    "long_factor": Each(_POSITIVE),
    # drafters
    "soothsay_method": TEXT,
    "speculators_model_type": TEXT,
    "target_layers": Whole(1, MAX_LAYERS),
    "target_hidden_size": _SIZE,
    "draft_vocab_size": Whole(1, 2**24),
    "num_heads": Whole(1, 65_536),
    "num_layers": _LAYER,
    "size": Whole(1, 1024),  # tokens that a block drafter guesses in one pass
    "markov_rank": Whole(0, 65_536),
    "taps": Each(_LAYER),
    "eagle_aux_hidden_state_layer_ids": Each(Whole(-1, MAX_LAYERS)),
    "use_aux_hidden_state": FLAG,
    "norm_before_residual": FLAG,
    "norm_before_fc": FLAG,
    "fc_norm": FLAG,
    "norm_output": FLAG,
    "num_nextn_predict_layers": _LAYER,
    "original_lm_head": FLAG,
    "zero_first": FLAG,
    "num_target_layers": Whole(1, MAX_LAYERS),
    "target_layer_ids": Each(Whole(-1, MAX_LAYERS)),
    "aux_hidden_state_layer_ids": Each(_LAYER),
    "block_size": _SIZE,
    "mask_token_id": _TOKEN,
    "ptd_token_id": _TOKEN,
    "pard_token": _TOKEN,
    "parallel_drafting": FLAG,
    "is_causal": FLAG,
    "causal": FLAG,
    "sliding_window_non_causal": FLAG,
    "sample_from_anchor": FLAG,
    "input_embedding_scale": _POSITIVE,
    "output_multiplier": _POSITIVE,
    "conv_kernel_size": _SIZE,
    "conv_group_size": _SIZE,
    "selector_rank": _SIZE,
    "selector_top_k": _SIZE,
    "xpress_rank": _SIZE,
    "speculative_tokens": _SIZE,
    "backbone_hidden_size": _SIZE,
    "use_ordered_embeddings": FLAG,
    "num_centroids": Whole(1, 2**24),
    "centroid_intermediate_top_k": Whole(1, 2**24),
}
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
