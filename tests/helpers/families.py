"""Tiny random models of every family that `transformers` makes and saves, and passes of our models."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

VOCAB = 97
BLOCK = 8  # tokens in a KV block
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # large enough to matter
}
TABLES = ("embed_tokens", "embed_in", "embed_positions", "word_embeddings", "wte", "wpe")
LLAMAS = ("InternLM3", "IQuestCoder", "Exaone")
"""Configurations without a model of their own."""
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GROWING = YARN | {
    **{"original_max_position_embeddings": 16, "factor": 16.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
}
"""Queries grow with the position."""
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
}
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
HYBRID = {
    "num_hidden_layers": 5,  # the fourth has attention
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
HYBRID_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 9,
    "final_logit_softcapping": 6.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
GRANITE_HYBRID = {
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention"] * 2, *["full_attention", "linear_attention"], "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.7,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.6,
}
FALCON_H1 = {
    "num_attention_heads": 2,  # of 32, which native kernels need
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "eos_token_id": None,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 24,
}
MAMBA = {
    **{"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 3, "state_size": 16, "conv_kernel": 3},
    **{"layer_norm_epsilon": 1e-3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
JAMBA = {
    **{"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_attention_heads": 2},
    **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 16},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
NEMOTRON_H = {
    **{key: value for key, value in SIZES.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": None,
    "eos_token_id": None,
    "layer_norm_epsilon": 1e-3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
}
MAMBA2 = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "pad_token_id": None,
    "eos_token_id": None,
    "layer_norm_epsilon": 1e-3,
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 2,
    "state_size": 16,
}
SHARED_KV = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 48}
GEMMA3N = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 32,
    "sliding_window": 9,
    "final_logit_softcapping": 6.0,
    "vocab_size_per_layer_input": 90,  # the other tokens read the embeddings of token 0
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 3,
    "laurel_rank": 32,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.3, 0.0],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> transformers' class, its own settings
    "llama1": ("Llama", {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama3": (
        "Llama",
        {
            "num_attention_heads": 8,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama_rope_llama3": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_rope_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_rope_yarn": ("Llama", {"head_dim": 32, "max_position_embeddings": 128, "rope_parameters": YARN}),
    "llama_rope_yarn_options": (
        "Llama",
        {
            "head_dim": 32,
            "max_position_embeddings": 128,
            "rope_parameters": {
                **YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "llama_rope_dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 10, "head_dim": 24}),
    "phi3": ("Phi3", {"sliding_window": 10, "pad_token_id": None}),
    "phi4_mini": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "partial_rotary_factor": 0.75,  # 24 of 32 dimensions
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [1.5 + 0.7 * i for i in range(12)],
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": None, "no_rope_layer_interval": 2}),
    "smollm3_windows": (
        "SmolLM3",
        {
            "num_attention_heads": 2,
            "pad_token_id": None,
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": False,
        },
    ),
    "granite": (
        "Granite",
        {
            "num_attention_heads": 2,
            "embedding_multiplier": 3.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.6,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.6,
        },
    ),
    "granite_moe": (
        "GraniteMoe",
        {
            "num_attention_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "embedding_multiplier": 3.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.6,
        },
    ),
    "granite4_hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            "num_attention_heads": 2,  # of 32, which native kernels need
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "position_embedding_type": "rope",
        },
    ),
    "granite4_experts": (
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **FALCON_H1,
            "embedding_multiplier": 3.7,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.6, 1.5, 1.7, 1.2, 0.5],
            "mlp_multipliers": [1.6, 0.55],
        },
    ),
    "falcon_h1_normed": ("FalconH1", {**FALCON_H1, "mamba_d_conv": 3, "mamba_rms_norm": True}),
    "nemotron_h": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "conv_kernel": 3,
            "mlp_bias": True,
        },
    ),
    "nemotron_h_experts": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **LATENT,
            "num_hidden_layers": 5,  # the last has attention
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "pad_token_id": None,
        },
    ),
    "mamba": ("Mamba", {**MAMBA, "time_step_rank": 32}),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "tie_word_embeddings": False, "mixer_rms_eps": 0.1}),
    "jamba": ("Jamba", {**JAMBA, "num_experts": 4}),
    "jamba_dense": ("Jamba", {**JAMBA, "num_experts": 1}),
    "mamba2": ("Mamba2", {**MAMBA2, "conv_kernel": 3}),
    "mamba2_tied": ("Mamba2", {**MAMBA2, "n_groups": 1, "tie_word_embeddings": True}),
    "bitnet": ("BitNet", {"num_attention_heads": 2}),
    "apertus": (
        "Apertus",
        {
            "num_attention_heads": 2,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 6,
            "intermediate_size": 48,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 20,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "pad_token_id": None,
            "rope_parameters": {**GROWING},  # a copy, since transformers writes to it
        },
    ),
    "ernie": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "seed_oss": ("SeedOss", {"head_dim": 32, "pad_token_id": None}),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 5, "num_attention_heads": 2, "sliding_window": 9, "sliding_window_pattern": 4},
    ),
    "exaone4_full": (
        "Exaone4",
        {"num_attention_heads": 2, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "olmo2": ("Olmo2", {"pad_token_id": None, "attention_bias": True}),
    "olmo2_groups": ("Olmo2", {"pad_token_id": None, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3",
        {
            "pad_token_id": None,
            "num_hidden_layers": 5,
            "num_attention_heads": 2,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "pad_token_id": None,
            "rope_parameters": {**GROWING},  # a copy, since transformers writes to it
        },
    ),
    "glm": ("Glm", {"head_dim": 32, "pad_token_id": None}),
    "glm4": (
        "Glm4",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "pad_token_id": None,
            "attention_bias": False,
        },
    ),
    "cohere": ("Cohere", {"layer_norm_eps": 1e-3, "logit_scale": 1.3, "attention_bias": True}),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_norm_eps": 1e-3,
            "logit_scale": 1.3,
            "sliding_window": 9,
        },
    ),
    "qwen2": ("Qwen2", {"num_attention_heads": 8}),
    "qwen2_windows": (
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "sliding_window": 11,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 11,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3n": ("Gemma3n", GEMMA3N),
    "gemma4": ("Gemma4", {**GEMMA4, **SHARED_KV, "hidden_size_per_layer_input": 32}),
    "gemma4_keys_are_values": ("Gemma4", {**GEMMA4, **KEYS_ARE_VALUES}),
    "gemma4_experts": ("Gemma4", {**GEMMA4, **EXPERTS, **KEYS_ARE_VALUES}),
    "gemma4_all": (
        "Gemma4",
        {**GEMMA4, **SHARED_KV, **EXPERTS, **KEYS_ARE_VALUES, "hidden_size_per_layer_input": 32},
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {key: value for key, value in {**GEMMA4, **SHARED_KV}.items() if "per_layer" not in key},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 64,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**LATENT, **GROUPS, "topk_method": "greedy", "q_lora_rank": None, "v_head_dim": 16},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 32,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 64,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "pad_token_id": None,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 32,
            "first_k_dense_replace": 1,
            "index_topk": 128,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "pad_token_id": None,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 32,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "index_topk": 128,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "indexer_types": ["full", "shared", "full"],
            "pad_token_id": None,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "rope_parameters": YARN | {"truncate": False, "factor": 8.0},
        },
    ),
    "qwen3_5": ("Qwen3_5", {**HYBRID, "attention_bias": True}),
    "qwen3_5_tied": (
        "Qwen3_5",
        {**HYBRID, "linear_num_value_heads": 2, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {**HYBRID, **HYBRID_EXPERTS}),
    "qwen3_next": ("Qwen3Next", {**HYBRID, **HYBRID_EXPERTS, "mlp_only_layers": [2]}),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 5,
            "intermediate_size": 100,
            "block_multiple_of": 16,
            "eos_token_id": None,  # answers go on
            "norm_eps": 1e-3,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "eos_token_id": None,
            "norm_eps": 1e-3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 12,
            "floor_scale": 10,
            "attn_scale": 0.7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4_scout": (
        "Llama4",
        {
            "num_attention_heads": 2,
            "num_local_experts": 4,
            "attention_chunk_size": 8,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "no_rope_layer_interval": 2,
        },
    ),
    "qwen3_moe_sparse": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "decoder_sparse_step": 2,
        },
    ),
    "gemma1": ("Gemma", {"head_dim": 24}),
    "olmo1": ("Olmo", {"pad_token_id": None, "clip_qkv": 0.9}),
    "olmoe": (
        "Olmoe",
        {"pad_token_id": None, "num_attention_heads": 2, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {
            "head_dim": 32,
            "num_experts": 6,
            "moe_topk": 3,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hy3": (
        "HYV3",
        {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "ernie_moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 40,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 2,
            "sliding_window": 9,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 9,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "dots1": (
        "Dots1",
        {**GROUPS, "num_attention_heads": 2, "first_k_dense_replace": 1, "sliding_window": 9}
        | {"max_window_layers": 2},
    ),
    "solar_open": ("SolarOpen", {**GROUPS, "head_dim": 32, "attention_bias": True}),
    "mellum": (
        "Mellum",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "flex_olmo": (
        "FlexOlmo",
        {"num_attention_heads": 2, "pad_token_id": None, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "jais2": ("Jais2", {"layer_norm_eps": 1e-3}),
    "vaultgemma": ("VaultGemma", {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 50}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 32}),
    "exaone": ("Exaone", {"head_dim": 32}),
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
        },
    ),
    "internlm3": ("InternLM3", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "helium": ("Helium", {"head_dim": 32, "num_attention_heads": 2}),
    "cwm": ("Cwm", {"num_hidden_layers": 5, "head_dim": 32, "sliding_window": 9}),
    "ministral": (
        "Ministral",
        {"head_dim": 32, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "starcoder2": ("Starcoder2", {"head_dim": 32, "sliding_window": 10, "norm_epsilon": 1e-3}),
    "stablelm": ("StableLm", {"num_attention_heads": 2, "layer_norm_eps": 1e-3, "use_qkv_bias": True}),
    "stablelm_parallel": ("StableLm", {"num_attention_heads": 2, "use_parallel_residual": True}),
    "nemotron": ("Nemotron", {"num_attention_heads": 2, "norm_eps": 1e-3}),
    "phi": ("Phi", {"num_attention_heads": 2, "layer_norm_eps": 1e-3}),
    "gpt_neox": ("GPTNeoX", {**TWO_HEADS, "layer_norm_eps": 1e-3}),
    "gpt_neox_serial": (
        "GPTNeoX",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "rotary_pct": 0.5, "hidden_act": "relu"},
    ),
    "gpt2": ("GPT2", {**TWO_HEADS, "n_inner": 80, "layer_norm_epsilon": 1e-3}),
    "gptj": (
        "GPTJ",
        {"num_key_value_heads": 4, "n_inner": 80, "rotary_dim": 8, "layer_norm_epsilon": 1e-3},
    ),
    "opt": ("OPT", {**TWO_HEADS, "ffn_dim": 80}),
    "opt_plain": (
        "OPT",
        {**TWO_HEADS, "ffn_dim": 80, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "falcon": ("Falcon", {"num_attention_heads": 2, "ffn_hidden_size": 80, "layer_norm_epsilon": 1e-3}),
    "falcon_groups": (
        "Falcon",
        {
            "ffn_hidden_size": 80,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
    ),
    "falcon_heads": (
        "Falcon",
        {
            "num_kv_heads": 4,
            "ffn_hidden_size": 80,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "q_lora_rank": 64,
            "scale_emb": 3,
            "dim_model_base": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.1 * i for i in range(16)],
                "long_factor": [1.5 + 0.7 * i for i in range(16)],
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
}
HYBRIDS = ("qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "qwen3_5_vision")
MULTIMODALS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # and settings of the vision part
    "qwen3_5_vision": (
        "Qwen3_5",
        {
            **HYBRID,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}
GLM_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
MULTIMODALS["glm4v"] = "Glm4v", {"rope_parameters": MROPE}, GLM_VISION
MULTIMODALS["glm4v_moe"] = "Glm4vMoe", {**GROUPS, "head_dim": 16, "rope_parameters": MROPE}, GLM_VISION
MULTIMODALS["qwen3_vl_moe"] = (
    "Qwen3VLMoe",
    {
        **MULTIMODALS["qwen3_vl"][1],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    MULTIMODALS["qwen3_vl"][2],
)
MULTIMODALS["llama4_multimodal"] = (
    "Llama4",
    {**CASES["llama4"][1]},
    {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "image_size": 28,
        "patch_size": 14,
    },
)
MULTIMODAL = "gemma3_multimodal"  # the model of "gemma3", saved as the decoder of a multimodal model


def random_oracle(name: str, **changes: Any) -> Any:
    """Make a random model of transformers. Its attention, norms and biases all affect its logits."""
    if name in MULTIMODALS:
        family, settings, vision = MULTIMODALS[name]
        tied = settings.get("tie_word_embeddings", False)
        config = getattr(transformers, f"{family}Config")(
            text_config={**SIZES, **settings}, vision_config=vision, tie_word_embeddings=tied
        )
        whole = f"{family}ForConditionalGeneration"
    else:
        family, settings = CASES[name]
        text = family.startswith(("Gemma3", "Gemma4")) or family in ("Llama4", "Qwen3_5", "Qwen3_5Moe")
        suffix = "TextConfig" if text else "Config"
        sizes = (
            {} if family in ("NemotronH", "Mamba2", "Mamba", "FalconMamba") else SIZES
        )  # which have other names for some
        config = getattr(transformers, family + suffix)(**{**sizes, **settings, **changes})
        classes = {"GPT2": "GPT2LMHeadModel"} | dict.fromkeys(LLAMAS, "LlamaForCausalLM")
        whole = classes.get(family, f"{family}ForCausalLM")
    oracle = getattr(transformers, whole)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sharper = ("q_proj.weight", "k_proj.weight", "lm_head.weight", "gate.weight")
    factors = ("norm.weight", "norm_f.weight", "norm_1.weight", "norm_2.weight", "scale")
    factors += ("ln_1.weight", "ln_2.weight", "ln_f.weight")
    for key, parameter in oracle.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith(factors):
            zero = family in ("Gemma", "Gemma2", "Gemma3", "VaultGemma", "Nemotron") or (
                name in HYBRIDS and "linear_attn" not in key
            )
            centre = 0.0 if zero else 1.0
            value = centre + 0.3 * noise
            if family.startswith(("Gemma3n", "Gemma4")) and key.endswith("q_norm.weight"):
                value *= 0.3  # nothing else scales its attention, and sharp attention enlarges rounding
        elif parameter.ndim == 1 or key.endswith("_bias"):  # a bias, or a stack of them
            value = 0.5 * noise
        elif key.endswith(("dt_proj.weight", "x_proj.weight")):  # long steps enlarge rounding
            value = 0.3 * noise * parameter.shape[-1] ** -0.5
        elif family == "GptOss" and key.endswith("experts.gate_up_proj"):
            value = 0.6 * noise  # beyond the bounds of its activation
        elif family == "GptOss" and key.endswith("experts.down_proj"):
            value = 0.03 * noise
        elif any(f"{table}." in key or f"{table}_per" in key for table in TABLES):
            value = 0.4 * noise
        else:
            value = noise * parameter.shape[-1] ** -0.5 * (1.7 if key.endswith(sharper) else 1.0)
        parameter.data.copy_(value)
    for key, buffer in oracle.named_buffers():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
        elif key.endswith("layer_scalar"):
            buffer.fill_(0.5 + 0.5 * float(torch.rand(1, generator=generator)))
    return oracle.eval()


def make_multimodal(directory: Path) -> None:
    """Save the decoder again as part of a multimodal model, as in Gemma 3's checkpoints."""
    config = read_config(directory)
    write_config(directory, {"model_type": "gemma3", "text_config": config, "vision_config": {}})
    weights = load_file(directory / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    renamed["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(2, 2)
    save_file(renamed, directory / "model.safetensors")


def load(directory: Path, dtype: Any = "float32") -> Transformer:
    return load_model(open_checkpoint(directory), dtype=dtype)


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def random_tokens(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


def array(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(tokens, dtype=np.int64)


@torch.no_grad()
def run(
    model: Transformer, requests: Sequence[Rows], cache: KVPool | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    batch = pack(model, requests)
    hidden, _ = model(batch, cache)
    every = torch.split(model.logits(hidden), [request.num_rows for request in requests])
    asked = model.logits(hidden[batch.logit_rows])
    return list(every), [asked[start:end] for start, end in batch.spans]


def pack(model: Transformer, requests: Sequence[Rows]) -> Batch:
    config = model.spec
    return Batch.pack(requests, block_size=BLOCK, group=config.group, windows=config.windows)


def older_spelling(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Rewrite a configuration as transformers before 5 did, without `rope_parameters`.

    It has `rope_theta` and `rope_scaling` instead.
    `kind` is the key of the scaling's type, which was `type` first and `rope_type` later.
    """
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = config["rope_parameters"]
    if config["model_type"] not in (
        "granitemoehybrid",
        "exaone4",
        "ministral",
        "lfm2",
        "lfm2_moe",
        "gemma3n_text",
        "qwen2_moe",
    ):  # where it always was
        older.pop("layer_types", None)
    if "sliding_attention" in rope:
        if config["model_type"].startswith("gemma3"):
            older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            older |= {"sliding_window_pattern": older.pop("_sliding_window_pattern", 0)}
        rope = rope["full_attention"]
    if config["model_type"] == "gpt_neox":
        return {
            **older,
            "rotary_emb_base": rope["rope_theta"],
            "rotary_pct": rope["partial_rotary_factor"],
        }
    older["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    moved = ("rope_theta", "rope_type", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in moved}
    older["rope_scaling"] = {**scaling, kind: rope["rope_type"]} if scaling else None
    return older
