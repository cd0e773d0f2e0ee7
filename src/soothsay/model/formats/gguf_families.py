"""What single families have in GGUF files: keys of their own, and names of tensors.

Names and keys are those of llama.cpp's converter (`conversion/`, `gguf-py/gguf/constants.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_LAYERS
from soothsay.model.formats import gguf_gemma3n, gguf_gemma4, gguf_glm, gguf_latent, gguf_nemotron_h
from soothsay.model.formats.gguf_config import Header
from soothsay.model.formats.gguf_tensors import Change
from soothsay.model.hf_names import names_of

INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3")
"""Architectures that llama.cpp rotates by neighbours: its converter interleaves the rows of q and k."""

_OUTER_PARTS = {
    "token_embd": "embedding",
    "output_norm": "norm",
    "token_embd_norm": "=embedding_norm",  # LFM2's last norm
    "per_layer_token_embd": "layer_embeddings.table",
    "per_layer_model_proj": "layer_embeddings.projection",
    "per_layer_proj_norm": "layer_embeddings.norm",
}
_BLOCK_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.qkv:0",
    "attn_k": "attention.qkv:1",
    "attn_v": "attention.qkv:2",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_up:0",
    "ffn_up": "mlp.gate_up:-1",
    "ffn_down": "mlp.down",
}
"""Parts of most files -> our module, which of its tensors it is, and how its name goes on; or a name after =.

A part with its suffix stands for a whole name."""


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


_AFTER = {"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"}
_BEFORE_MLP = {"post_attention_norm": "mlp_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up:0",
    "ffn_up_exps": "mlp.experts.gate_up:-1",
    "ffn_down_exps": "mlp.experts.down",
}
_CORRECTION = {"exp_probs_b.bias": "mlp.correction:0:.e_score_correction_bias"}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared.gate_up:0",
    "ffn_up_shexp": "mlp.shared.gate_up:-1",
    "ffn_down_shexp": "mlp.shared.down",
}
_DELTA = {
    **_BEFORE_MLP,
    "attn_qkv": "attention.qkvz:0",
    "attn_gate": "attention.qkvz:1",
    "ssm_beta": "attention.gates:0",
    "ssm_alpha": "attention.gates:-1",
    "ssm_conv1d": "attention.recurrence:0:.conv1d",
    "ssm_dt.bias": "attention.recurrence:0:.dt_bias",
    "ssm_a": "attention.recurrence:0:.A_log",
    "ssm_norm": "attention.recurrence:0:.norm",
    "ssm_out": "attention.recurrence:0:.out_proj",
}
_DELTA_AND_EXPERTS = {**_DELTA, **_EXPERTS, **_SHARED, "ffn_gate_inp_shexp": "mlp.shared_gate"}
_MAMBA2 = {
    "ssm_in": "attention.zxbct",
    "ssm_conv1d": "attention.rule:0:.conv1d",
    "ssm_dt.bias": "attention.rule:0:.dt_bias",
    "ssm_a": "attention.rule:0:.A_log",
    "ssm_d": "attention.rule:0:.D",
    "ssm_norm": "attention.rule:0:.norm",
    "ssm_out": "attention.rule:0:.out_proj",
}
_LAYER_INPUTS = {
    "inp_gate": "layer_input.gate",
    "proj": "layer_input.projection",
    "post_norm": "layer_input.post_norm",
}
_LFM2 = {
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.correction:0:.expert_bias",
    "shortconv.conv": "attention.taps",
    "shortconv.in_proj": "attention.bcx",
    "shortconv.out_proj": "=conv.out_proj",
}
_GRANITE = {**_MAMBA2, **_EXPERTS, **_SHARED}
FUSED = "ffn_gate_up_exps"
"""Experts' gates and up, one after the other in one matrix: the halves of `FUSED_HALVES`."""

FUSED_HALVES = "ffn_gate_exps", "ffn_up_exps"
FAMILY_PARTS: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "exaone4", "olmo2", "olmo3", "glm4"), _AFTER),
    "gemma3n_text": {
        **_AFTER,
        **_LAYER_INPUTS,
        "altup_correct_coef": "alternate.corrections",
        "altup_correct_scale.weight": "alternate.scale:0:.correct_output_scale",
        "altup_predict_coef": "alternate.predictions",
        "altup_router": "alternate.router",
        "altup_router_norm": "alternate.router_norm",
        "laurel_l": "laurel_in",
        "laurel_r": "laurel_out",
        "laurel_post_norm": "laurel_norm",
    },
    "gemma4_text": {
        **_AFTER,
        **_LAYER_INPUTS,
        "pre_ffw_norm_2": "mlp.experts_norm",
        "post_ffw_norm_1": "mlp.dense_post_norm",
        "post_ffw_norm_2": "mlp.experts_post_norm",
        "layer_output_scale.weight": "=layer_scalar",
        "ffn_gate_inp": "mlp.mixture.router",
        "ffn_gate_inp.scale": "mlp.router_norm:0:.scale",
        "ffn_gate_exps": "mlp.mixture.experts.gate_up:0",
        "ffn_up_exps": "mlp.mixture.experts.gate_up:1",
        "ffn_down_exps": "mlp.mixture.experts.down",
        "ffn_down_exps.scale": "mlp.mixture.scales:0:.per_expert_scale",
    },
    "seed_oss": _BEFORE_MLP,
    "phi3": {"attn_qkv": "attention.qkv"},
    **dict.fromkeys(("granitemoe_gguf", "granitemoehybrid_gguf"), _GRANITE),
    "falcon_h1": {  # whose converter may name a norm without `.weight`
        **_MAMBA2,
        **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "mlp_norm:0:.weight"),
    },
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _EXPERTS),
    "minimax_m2": {**_EXPERTS, **_CORRECTION},
    "nemotron_h": {  # queries and keys are permuted alike, which changes no score: nothing rotates
        **_MAMBA2,
        **_EXPERTS,
        **_CORRECTION,
        **_SHARED,
        "attn_norm": "part_norm",
        "ffn_latent_down": "mlp.latent_in",
        "ffn_latent_up": "mlp.latent_out",
    },
    "glm4_moe": {**_BEFORE_MLP, **_EXPERTS, **_CORRECTION, **_SHARED},
    "deepseek_v3": {
        **_EXPERTS,
        **_CORRECTION,
        **_SHARED,
        "attn_q_a": "attention.q_a",
        "attn_q_a_norm": "attention.q_a_norm",
        "attn_q_b": "attention.q_b",
        "attn_kv_a_mqa": "attention.kv_a",
        "attn_kv_a_norm": "attention.kv_a_norm",
        "attn_kv_b": "attention.kv_b",
        "attn_k_b": "=self_attn.k_b_proj",
        "attn_v_b": "=self_attn.v_b_proj",
    },
    "llama4_text": {**_EXPERTS, **_SHARED},
    "gpt_oss": {**_BEFORE_MLP, **_EXPERTS, "attn_sinks.weight": "attention.sinks:0:.sinks"},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA_AND_EXPERTS,
    "qwen3_next_gguf": {**_DELTA_AND_EXPERTS, "ssm_ba": "attention.gates"},
}
"""Parts of blocks that a family has beside the usual ones, or in their place."""


def outer_names(family: str) -> dict[str, str]:
    """Hugging Face's names of what a family has outside of its blocks, by GGUF's."""
    found = {part: f"model.{name}" for part, name in _resolved(family, _OUTER_PARTS)}
    return {**found, "output": "lm_head", **(gguf_gemma3n.OUTER_NAMES if family == "gemma3n_text" else {})}


def block_names(family: str) -> dict[str, str]:
    """Hugging Face's names of a block's parts, by GGUF's. {} stands for the expert."""
    return dict(_resolved(family, {**_BLOCK_PARTS, **FAMILY_PARTS.get(family, {})}))


def _resolved(family: str, parts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Parts, and Hugging Face's names. Without those that are in one tensor with others there."""
    names = names_of(family)
    for part, target in parts.items():
        module, _, tail = target.partition(":")
        place, _, rest = tail.partition(":")
        if target.startswith("="):
            yield part, target[1:]
        elif int(place or 0) < len(names[module]):
            yield part, names[module][int(place or 0)] + rest


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
