"""What single families have in GGUF files: keys of their own, and names of tensors.

Names and keys are those of llama.cpp's converter (`conversion/`, `gguf-py/gguf/constants.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soothsay.errors import ModelError
from soothsay.model.config_fields import MAX_LAYERS
from soothsay.model.formats.gguf_config import Header

INTERLEAVED = ("llama", "smollm3", "granite", "mistral3")
"""Architectures that llama.cpp rotates by neighbours: its converter interleaves the rows of q and k."""

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILY_NAMES = {  # {} stands for the expert; a name with its suffix stands for a whole name
    "gemma2": _GEMMA_NAMES,
    "gemma3_text": _GEMMA_NAMES,
    "olmo2": _OLMO_NAMES,
    "olmo3": _OLMO_NAMES,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "qwen3_moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
}


def own_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that only the header's family has. `config` has the others."""
    get = header.number
    if header.family.startswith("gemma"):
        return _gemma_config(header, config)
    if header.family == "granite":
        keys = {
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        }
        given = {name: get(key) for name, key in keys.items()}
        return {name: value or 1.0 for name, value in given.items()}
    if header.family == "glm4" and header.metadata.get("glm4.rope.dimension_sections") is not None:
        raise ModelError(f"{header.path}: the text part of GLM-4V is not supported, only GLM-4")
    own = (
        {"sliding_window": get("attention.sliding_window")}
        if header.family in ("phi3", "cohere2", "olmo3", "gpt_oss")
        else {}
    )
    if header.family in ("cohere", "cohere2"):
        own["logit_scale"] = header.require("logit_scale")
    return own | (_layer_types(header, config) if header.family == "olmo3" else {})


def _gemma_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    gemma2, get, layers = header.family == "gemma2", header.number, int(config["num_hidden_layers"])
    # the 27B model; the file does not state the scale of attention
    largest = layers == (46 if gemma2 else 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": get("attention.sliding_window", 4096 if gemma2 else None),
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0 if gemma2 else None),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0 if gemma2 else None),
    }
    if not gemma2:
        own["rope_local_base_freq"] = get("rope.freq_base_swa", 1e4)
    return own | _layer_types(header, config)


def _layer_types(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with a sliding window, if the file says which."""
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    layers = int(config["num_hidden_layers"])
    if pattern is None:
        return {}
    if not isinstance(pattern, np.ndarray | int) or layers > MAX_LAYERS:
        raise ModelError(
            f"{header.path}: sliding_window_pattern {pattern!r:.80} of {layers} layers is damaged"
        )
    local = (  # an array of booleans, or n: every n-th layer is global
        pattern.tolist()
        if isinstance(pattern, np.ndarray)
        else [not pattern or (i + 1) % pattern for i in range(layers)]
    )
    return {"layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local]}
