"""What single families have in GGUF files: keys of their own, and names of tensors.

Names and keys are those of llama.cpp's converter (`conversion/`, `gguf-py/gguf/constants.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_LAYERS
from soothsay.model.formats import gguf_gemma3n, gguf_gemma4, gguf_glm, gguf_latent, gguf_nemotron_h
from soothsay.model.formats.gguf_config import Header
from soothsay.model.formats.gguf_tensors import Change

INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3")
"""Architectures that llama.cpp rotates by neighbours: its converter interleaves the rows of q and k."""


def _log_rates(rates: Tensor) -> Tensor:
    """A from the stored -e^A. Raises `ModelError` for rates at which a state would grow."""
    if not bool((rates < 0).all()):
        raise ModelError("a tensor ssm_a has rates that are not below 0; the file is damaged")
    return (-rates.float()).log()


_QWEN3_5_CHANGES: dict[str, Change] = {
    "ssm_a": _log_rates,
    "ssm_conv1d": lambda taps: taps[:, None],
    "ffn_gate_inp_shexp": lambda gate: gate.reshape(1, -1),
}
_MAMBA2_CHANGES: dict[str, Change] = {
    "ssm_a": lambda rates: _log_rates(rates).flatten(),
    "ssm_d": lambda skips: skips.flatten(),
    "ssm_norm": lambda scale: scale.flatten(),
    "ssm_conv1d": lambda stored: stored[:, None] if stored.ndim == 2 else stored,  # or the bias
}
_LFM2_CHANGES: dict[str, Change] = {"shortconv.conv": lambda taps: taps[:, None]}
CHANGES: dict[str, dict[str, Change]] = {
    "falcon_h1": _MAMBA2_CHANGES,
    "granitemoehybrid_gguf": _MAMBA2_CHANGES,
    "nemotron_h": _MAMBA2_CHANGES,
    "lfm2": _LFM2_CHANGES,
    "lfm2_moe": _LFM2_CHANGES,
    "qwen3_5_text": _QWEN3_5_CHANGES,
    "qwen3_5_moe_text": _QWEN3_5_CHANGES,
    "qwen3_next_gguf": _QWEN3_5_CHANGES,
}
"""By family and part of a block: from the stored numbers to those of Hugging Face."""


def is_centred(family: str, name: str) -> bool:
    """Whether a tensor is a norm's weight w that the converter stores as 1 + w."""
    zero_centred = family.startswith(("gemma2", "gemma3_", "qwen3_5", "qwen3_next"))
    return zero_centred and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that only the header's family has. `config` has the others.

    `shapes` are those of the tensors by GGUF's names.
    """
    get = header.number
    if header.family == "gemma3n_text":
        return gguf_gemma3n.own_config(header, config, shapes)
    if header.family == "gemma4_text":
        return gguf_gemma4.own_config(header, config, shapes)
    if header.family == "nemotron_h":
        return gguf_nemotron_h.own_config(header, config, shapes)
    if header.family == "glm4_moe":
        return gguf_glm.own_config(header, config, shapes)
    if header.family == "deepseek_v3":
        return gguf_latent.own_config(header, config, shapes)
    if header.family == "llama4_text":
        return _llama4_config(header, config)
    if header.family.startswith("lfm2"):
        return _lfm2_config(header, config)
    if header.family.startswith("gemma"):
        return _gemma_config(header, config)
    if header.family.startswith(("qwen3_5", "qwen3_next")):
        return _qwen3_5_config(header, config)
    if header.family == "falcon_h1":  # the converter multiplies the weights by all multipliers
        normed = "blk.0.ssm_norm.weight" in shapes
        return _mamba2_config(header) | {"mamba_rms_norm": normed, "mamba_norm_before_gate": False}
    if header.family.startswith("granite"):
        return _granite_config(header, config)
    if header.family == "glm4" and header.metadata.get("glm4.rope.dimension_sections") is not None:
        raise ModelError(f"{header.path}: the text part of GLM-4V is not supported, only GLM-4")
    own = (
        {"sliding_window": get("attention.sliding_window")}
        if header.family in ("phi3", "cohere2", "olmo3", "gpt_oss", "exaone4")
        else {}
    )
    if header.family in ("cohere", "cohere2"):
        own["logit_scale"] = header.require("logit_scale")
    return own | (_layer_types(header, config) if header.family in ("olmo3", "exaone4") else {})


def _qwen3_5_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of recurrent layers. The converter tiles their value heads, and appends MTP modules as layers."""
    require = header.require
    heads = max(require("ssm.time_step_rank"), 1)
    own = {
        "num_hidden_layers": config["num_hidden_layers"] - header.number("nextn_predict_layers", 0),
        "full_attention_interval": header.number("full_attention_interval", 4),
        "linear_conv_kernel_dim": require("ssm.conv_kernel"),
        "linear_key_head_dim": require("ssm.state_size"),
        "linear_value_head_dim": require("ssm.inner_size") // heads,
        "linear_num_key_heads": require("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_heads_tiled": header.family.startswith("qwen3_5"),
    }
    if header.family != "qwen3_5_text":
        shared = require("expert_shared_feed_forward_length")
        own |= {**header.experts(), "shared_expert_intermediate_size": shared}
    return own


def _lfm2_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without key-value heads have a convolution. Sizes of feed-forward parts are final."""
    kv = header.layers("attention.head_count_kv", config["num_hidden_layers"])
    own = {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv],
        "num_key_value_heads": max(kv, default=0) or 1,
        "conv_L_cache": header.require("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if header.family == "lfm2_moe":
        own |= {**header.experts(), "num_dense_layers": header.number("leading_dense_block_count", 0)}
    return own


def _granite_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers, and what experts and hybrids have. Layers without key-value heads are Mamba-2's."""
    get = header.number
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    own = {name: get(key) or 1.0 for name, key in keys.items()}
    if header.family == "granite":
        return own
    own["shared_intermediate_size"] = get("expert_shared_feed_forward_length", 0)
    if header.family == "granitemoe_gguf":
        return own
    experts = get("expert_count", 0)
    kv = header.layers("attention.head_count_kv", config["num_hidden_layers"])
    rotates = header.metadata.get(f"{header.architecture}.rope.scaling.finetuned", True)
    return own | {
        "layer_types": ["attention" if count else "mamba" for count in kv],
        "num_key_value_heads": max(kv, default=0) or 1,
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": get("expert_used_count", 0),
        "shared_intermediate_size": own["shared_intermediate_size"]
        if experts
        else config["intermediate_size"],
        **_mamba2_config(header),
    }


def _mamba2_config(header: Header) -> dict[str, Any]:
    """Sizes of Mamba-2's layers."""
    keys = {
        "mamba_d_ssm": "inner_size",
        "mamba_n_heads": "time_step_rank",
        "mamba_n_groups": "group_count",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
    }
    return {name: header.require(f"ssm.{key}") for name, key in keys.items()}


def _llama4_config(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter leaves out, as llama.cpp has it. Only Maverick does not norm queries and keys."""
    unchunked = header.number("attention.sliding_window") == 0
    own = {
        "intermediate_size": header.require("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": header.number("interleave_moe_layer_step", 1),
        "attention_chunk_size": None if unchunked else 8192,
        "use_qk_norm": header.number("expert_count") != 128,
    }
    if unchunked:
        own["no_rope_layers"] = [1] * min(int(config["num_hidden_layers"]), MAX_LAYERS)
    return own


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
