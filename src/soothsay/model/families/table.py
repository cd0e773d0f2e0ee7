"""The model families: what each does unlike Llama, where its `config.json` does not say so.

A new family is one entry of `FAMILIES`; `Family` lists what an entry can say. The names of its tensors stand
in `soothsay.model.tensor_names`.
"""

from __future__ import annotations

from dataclasses import replace

from soothsay.model.families import falcon_h1, gemma3n, gemma4, nemotron_h
from soothsay.model.families.family import Family
from soothsay.model.families.layers import (
    all_but_each,
    all_layers,
    all_or_none,
    even_layers,
    every_layer,
    full_layers,
    full_layers_beside_windows,
    last_layers,
    listed_layers,
    no_layer,
    rotated_layers,
    unrotated_layers,
)
from soothsay.model.families.rewrites import (
    bounded_at_7,
    ernie,
    exaone4,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    listed_experts,
    llama4,
    rotary_share,
    seed_oss,
    softmax_groups,
    with_layer_types,
)

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
    rewritten=gemma4.with_layer_types,
    finished=gemma4.finished,
    defaults=gemma4.DEFAULTS,
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

_LFM2 = Family(
    qk_norm=True,
    has_convolutions=True,
    default_tied=True,
    default_theta=1e6,
    norm_eps_key="norm_eps",
    default_norm_eps=1e-5,
    rewritten=lfm2,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 128_000, "conv_L_cache": 3},
)

_GRANITE_MOE = Family(has_multipliers=True, has_experts=True, always_normalizes_experts=True)
_GRANITE_HYBRID = replace(
    _GRANITE_MOE,
    has_state_spaces=True,
    unrotated=all_or_none,
    rewritten=granite_hybrid,
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
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
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_gguf": _GRANITE_MOE,  # our own: gate and up are matrices of their own
    "granitemoehybrid": _GRANITE_HYBRID,
    "granitemoehybrid_gguf": _GRANITE_HYBRID,
    "falcon_h1": Family(
        default_norm_eps=1e-5,
        has_state_spaces=True,
        rewritten=falcon_h1.rewritten,
        finished=falcon_h1.finished,
        defaults=falcon_h1.DEFAULTS,
    ),
    "nemotron_h": Family(
        activation_key="mlp_hidden_act",
        default_activation="relu2",
        norm_eps_key="layer_norm_epsilon",
        default_norm_eps=1e-5,
        has_state_spaces=True,
        has_experts=True,
        routes_by_sigmoid=True,
        unrotated=all_layers,
        rewritten=nemotron_h.rewritten,
        finished=nemotron_h.finished,
        defaults=nemotron_h.DEFAULTS,
    ),
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
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        has_experts=True,
        routes_by_sigmoid=True,
        correction_name="expert_bias",
        rewritten=lfm2_moe,
        defaults={
            **_LFM2.defaults,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
        },
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
    "ernie4_5": Family(
        default_tied=True,
        rotates_neighbours=True,
        default_theta=5e5,
        default_norm_eps=1e-5,
        rewritten=ernie,
        defaults={"head_dim": 128},
    ),
    "seed_oss": Family(
        default_attention_bias=True, o_bias=False, rewritten=seed_oss, defaults={"head_dim": 128}
    ),
    "exaone4": replace(
        _OLMO,
        qk_norm_over_heads=False,
        windowed=all_but_each(4),
        unrotated=full_layers_beside_windows,
        rewritten=exaone4,
    ),
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
    "gemma3n_text": Family(
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
        post_norms=True,
        scaled_embedding=True,
        qk_norm=True,
        windowed=all_but_each(5),
        default_theta=1e6,
        local_rope=True,
        rewritten=gemma3n.rewritten,
        finished=gemma3n.finished,
        defaults=gemma3n.DEFAULTS,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, defaults=gemma4.UNIFIED_DEFAULTS),
}

_SPARSE = "its attention reads keys that an indexer chooses"
_BLOCKS = "its attention reads chosen blocks of keys"
_RECURRENT = "it has Mamba layers"
_NORMED_LAST = "its norms of queries and keys come after the rotation"
UNSUPPORTED: dict[str, str] = {  # by `model_type`
    "apertus": "its feed-forward parts have an activation of their own (xIELU)",
    "arcee": "its feed-forward parts have no gate",
    "bamba": _RECURRENT,
    "bert": "it is an encoder",
    "deepseek_ref": "it is DeepSeek-V4 in its authors' own format",
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "its attention runs over compressed keys, and its layers have several residual streams",
    "ernie4_5_moe": "its experts have not been tried",
    "exaone_moe": "its experts have not been tried",
    "glm_moe_dsa": _SPARSE,
    "hunyuan_v1_dense": _NORMED_LAST,
    "hunyuan_v1_moe": _NORMED_LAST,
    "jamba": _RECURRENT,
    "kimi_linear": "it has layers of Kimi Delta Attention",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "mimo": "it has not been tried: its code comes with its weights",
    "mimo_v2_flash": "its heads of keys and of values differ in size",
    "minimax_m3": _BLOCKS,
    "minimax_m3_vl": _BLOCKS,
    "nemotron": "its feed-forward parts have no gate",
    "nemotron-nas": "each of its blocks has a shape of its own",
    "rwkv7": "it has no attention",
    "step3p7": "its attention has a gate for each head",
    "t5": "it has an encoder",
    "whisper": "it reads speech",
}
"""Why some families do not run that people may try."""
