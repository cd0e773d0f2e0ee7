"""Keys of a Hugging Face config.json that GGUF files of single architectures have.

Functions get the metadata, the keys that all files have, and the tensors' shapes. Names and keys are those of
llama.cpp's converter (`conversion/`, `gguf-py/gguf/constants.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_LAYERS
from soothsay.model.families.gemma import GLOBAL, LOCAL
from soothsay.model.formats.gguf_metadata import Metadata

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor, by its name in the GGUF file."""

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def _experts(data: Metadata) -> Config:
    """How many experts a row chooses, and of how many."""
    used = data.require("expert_used_count")
    return {"num_experts_per_tok": used, "num_local_experts": data.require("expert_count")}


def own_experts(data: Metadata) -> Config:
    """Experts with a size of their own."""
    return {**_experts(data), "moe_intermediate_size": data.require("expert_feed_forward_length")}


def sized_experts(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts in a family that has no other feed-forward parts."""
    size = data.number("expert_feed_forward_length", config["intermediate_size"])
    return {**_experts(data), "intermediate_size": size}


def grouped_experts(data: Metadata, *, normalized: bool) -> Config:
    """Experts that are chosen from groups. `normalized`: weights add up to 1, if a file does not say."""
    groups = data.number("expert_group_count", 0) or 1
    return {
        **own_experts(data),
        "norm_topk_prob": bool(data.get("expert_weights_norm", normalized)),
        "routed_scaling_factor": data.number("expert_weights_scale", 0) or 1.0,
        "n_group": groups,
        "topk_group": data.number("expert_group_used_count", 0) or groups,
    }


def _deepseek_experts(data: Metadata, config: Config, *, normalized: bool) -> Config:
    """The same beside a shared part, after some dense layers. MTP modules are the last blocks."""
    return {
        "num_hidden_layers": config["num_hidden_layers"] - data.number("nextn_predict_layers", 0),
        **grouped_experts(data, normalized=normalized),
        "n_shared_experts": data.number("expert_shared_count", 0),
        "first_k_dense_replace": data.number("leading_dense_block_count", 0),
    }


def mixtral(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Mistral with experts."""
    return _experts(data)


def qwen2_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts beside a shared part."""
    shared = data.require("expert_shared_feed_forward_length")
    return own_experts(data) | {"shared_expert_intermediate_size": shared}


def olmo(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The bound of queries, keys and values."""
    return {"clip_qkv": data.number("attention.clamp_kqv")}


def acting(name: str) -> Callable[[Metadata, Config, Shapes], Config]:
    """The activation of all files of an architecture, which do not name it."""
    return lambda data, config, shapes: {"hidden_act": name}


def starcoder2(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """All linear layers have biases, or none."""
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": config["attention_bias"]}


def stablelm(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Parallel blocks have one norm, whatever the file says."""
    parallel = "blk.0.ffn_norm.weight" not in shapes
    return {"use_qkv_bias": config["attention_bias"], "use_parallel_residual": parallel}


def gpt_neox(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Queries of all heads come first, then keys."""
    parallel, biased = bool(data.get("use_parallel_residual", True)), "blk.0.attn_qkv.bias" in shapes
    own = {"use_parallel_residual": parallel, "attention_bias": biased}
    return {"hidden_act": "gelu", "qkv_by_head": False, **own}


def falcon(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Queries of all heads come first, then keys. Larger models have two norms in a block."""
    newer, norms = config["num_key_value_heads"] > 1, 1 + ("blk.0.attn_norm_2.weight" in shapes)
    own = {"new_decoder_architecture": newer, "num_ln_in_parallel_attn": norms, "bias": config["mlp_bias"]}
    return {"hidden_act": "gelu", "qkv_by_head": False, **own}


def qwen3_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts without a size of their own share the dense one."""
    found = _experts(data)
    usual = config["intermediate_size"] // max(found["num_experts_per_tok"], 1)
    size = data.number("expert_feed_forward_length", usual)
    return found | {"moe_intermediate_size": size, "norm_topk_prob": True}  # llama.cpp always normalizes


def minimax_m2(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Not all dimensions of a head rotate."""
    return sized_experts(data, config, shapes) | {
        "rotary_dim": data.number("rope.dimension_count", config["head_dim"])
    }


def gpt_oss(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts, and a window."""
    return sized_experts(data, config, shapes) | windowed(data, config, shapes)


def windowed(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The window."""
    return {"sliding_window": data.number("attention.sliding_window")}


def phimoe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts and a window. The head may have a bias."""
    own = sized_experts(data, config, shapes) | windowed(data, config, shapes)
    return own | {"lm_head_bias": "output.bias" in shapes}


def typed_windows(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The window, and the layers that have it."""
    return windowed(data, config, shapes) | layer_types(data, config)


def layer_types(data: Metadata, config: Config) -> Config:
    """The layers with a sliding window, if the file says which."""
    pattern, layers = data.raw("attention.sliding_window_pattern"), int(config["num_hidden_layers"])
    if pattern is None:
        return {}
    if not isinstance(pattern, np.ndarray | int) or layers > MAX_LAYERS:
        raise ModelError(f"{data.path}: sliding_window_pattern {pattern!r:.80} of {layers} layers is damaged")
    local = (  # an array of booleans, or n: every n-th layer is global
        pattern.tolist()
        if isinstance(pattern, np.ndarray)
        else [not pattern or (i + 1) % pattern for i in range(layers)]
    )
    return {"layer_types": [LOCAL if is_local else GLOBAL for is_local in local]}


def cohere(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The factor of logits."""
    return {"logit_scale": data.require("logit_scale")}


def cohere2(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same, and a window."""
    return windowed(data, config, shapes) | cohere(data, config, shapes)


def chatglm(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Queries, keys and values have biases, whether they are one matrix or three."""
    return {"attention_bias": config["attention_bias"] or "blk.0.attn_qkv.bias" in shapes}


def glm4(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Rows of the text part of GLM-4V are stored so that the halves of a head rotate together."""
    return {"rope_interleave": data.raw("rope.dimension_sections") is None}


def dots1(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts as in DeepSeek-V3."""
    return _deepseek_experts(data, config, normalized=True)


def afmoe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same, and a window in three of four layers."""
    own = dots1(data, config, shapes) | windowed(data, config, shapes)
    return own | {"num_dense_layers": own["first_k_dense_replace"], "mup_enabled": True}


def exaone_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same, and windows in some layers."""
    own = dots1(data, config, shapes)
    return own | typed_windows(data, {**config, **own}, shapes)


def hy3(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same. Blocks without a router are dense, and come first."""
    own = dots1(data, config, shapes)
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(own["num_hidden_layers"])]
    shared = data.require("expert_shared_feed_forward_length") // (own["moe_intermediate_size"] or 1)
    return own | {"n_shared_experts": shared, "first_k_dense_replace": sparse.count(False)}


def bailing(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same. Since 2.0, heads are normed, and sigmoids choose experts."""
    own, is_second = dots1(data, config, shapes), "blk.0.attn_q_norm.weight" in shapes
    return own | {
        "num_shared_experts": own["n_shared_experts"],
        "score_function": "sigmoid" if is_second else "softmax",
        "use_qkv_bias": config["attention_bias"],
    }


def mellum(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts, and windows in some layers, which rotate by a base of their own."""
    local = data.number("rope.freq_base_swa", config["rope_theta"])
    own = own_experts(data) | {"rope_local_base_freq": local}
    return own | typed_windows(data, config, shapes)


def ernie_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Experts in each n-th layer from one on."""
    own = _deepseek_experts(data, config, normalized=True)
    return own | {
        "moe_num_experts": own["num_local_experts"],
        "moe_k": own["num_experts_per_tok"],
        "moe_num_shared_experts": own["n_shared_experts"],
        "moe_layer_start_index": own["first_k_dense_replace"],
        "moe_layer_interval": data.number("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """How many experts a row chooses has a name of its own."""
    own = own_experts(data)
    return own | {"moe_topk": own["num_experts_per_tok"]}


def glm4_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Heads are normed if the file has norms."""
    own = _deepseek_experts(data, config, normalized=True)
    own["topk_group"] = data.number("expert_group_used_count", 1)
    return own | {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}


def latent(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Latent attention: DeepSeek-V2, V3, R1 and V3.2, Kimi K2, GLM-4.7-Flash, GLM-5. V2 has no sigmoids."""
    if data.number("attention.temperature_scale"):
        raise ModelError(
            f"{data.path}: latent attention with a temperature that grows (as in Mistral Large 3) is not "
            "supported; take another model"
        )
    get, require = data.number, data.require
    if not get("expert_count", 0):
        raise ModelError(
            f"{data.path}: latent attention without experts is not supported; take another model"
        )
    corrected = any(name.endswith("exp_probs_b.bias") for name in shapes)
    gating = get("expert_gating_func", 0) or (SIGMOID if corrected else SOFTMAX)  # older files do not say
    if gating not in (SOFTMAX, SIGMOID):
        raise ModelError(f"{data.path}: expert_gating_func {gating} is not supported, only 1 and 2")
    own = _deepseek_experts(data, config, normalized=False) | minicpm3(data, config, shapes)
    own["v_head_dim"] = get("attention.value_length_mla") or require("attention.value_length")
    if gating == SOFTMAX:
        method = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
        return own | {"model_type": "deepseek_v2", "topk_method": method}
    own["use_expert_bias"] = corrected
    if chosen := get("attention.indexer.top_k"):
        return own | {"model_type": "deepseek_v32", "index_topk": chosen}
    return own


def minicpm3(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The sizes of latent attention, but that of values."""
    get, require = data.number, data.require
    rotated = require("rope.dimension_count")
    squeezed = any(name.endswith("attn_q_a.weight") for name in shapes)
    return {
        "kv_lora_rank": require("attention.kv_lora_rank"),
        "q_lora_rank": require("attention.q_lora_rank") if squeezed else None,
        "qk_rope_head_dim": rotated,
        # the size without _mla is that of keys in the cache, in files that have both
        "qk_nope_head_dim": (get("attention.key_length_mla") or require("attention.key_length")) - rotated,
    }


def latent_scaling(data: Metadata) -> Config:
    """The file has a tenth of mscale_all_dim alone; mscale equals it in all of these models."""
    multiplier = data.number("rope.scaling.yarn_log_multiplier")
    return dict.fromkeys(
        ("mscale", "mscale_all_dim"), None if multiplier is None else round(10 * multiplier, 6)
    )


def ministral_scaling(data: Metadata) -> Config:
    """Queries that grow, beside YaRN."""
    multiplier = data.number("rope.scaling.yarn_log_multiplier")
    return {
        "llama_4_scaling_beta": data.number("attention.temperature_scale"),
        "mscale": None if multiplier is None else 1.0,
        "mscale_all_dim": multiplier,
    }


def llama4(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """What the converter leaves out, as llama.cpp has it. Only Maverick does not norm queries and keys."""
    unchunked = data.number("attention.sliding_window") == 0
    own = _experts(data) | {
        "intermediate_size": data.require("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": data.number("interleave_moe_layer_step", 1),
        "attention_chunk_size": None if unchunked else 8192,
        "use_qk_norm": data.number("expert_count") != 128,
    }
    if unchunked:
        own["no_rope_layers"] = [1] * min(int(config["num_hidden_layers"]), MAX_LAYERS)
    return own


def t5(data: Metadata, config: Config, shapes: Shapes, *, gated: bool) -> Config:
    """All layers of umT5 have numbers by distance. T5 1.0 has no gates, and scales logits."""
    own = any(name.endswith("blk.1.attn_rel_b.weight") for name in shapes)
    return {
        "model_type": "umt5" if own else "t5",
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "num_decoder_layers": data.number("decoder_block_count"),
        "relative_attention_num_buckets": data.require("attention.relative_buckets_count"),
        "decoder_start_token_id": data.number("decoder_start_token_id"),
        "scale_decoder_outputs": config["tie_word_embeddings"] or not gated,
    }


def granite(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Multipliers. MiniCPM and Bamba have none for scores."""
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    scores = data.number("attention.scale") or config["head_dim"] ** -0.5
    return {name: data.number(key) or 1.0 for name, key in keys.items()} | {"attention_multiplier": scores}


def granite_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Multipliers and experts."""
    shared = data.number("expert_shared_feed_forward_length", 0)
    return {**_experts(data), **granite(data, config, shapes), "shared_intermediate_size": shared}
