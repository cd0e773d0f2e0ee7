"""What GGUF files of models with latent attention have: DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash.

All are of architecture `deepseek2`. Older files have the matrix of a head's keys and values whole, as
`attn_kv_b`; newer ones have it cut, as `attn_k_b` and `attn_v_b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.formats import gguf_glm
from soothsay.model.formats.gguf_config import Header
from soothsay.model.formats.gguf_tensors import KeysAndValues, Stored

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that these families have. `shapes` are those of the tensors by GGUF's names."""
    if header.number("attention.temperature_scale"):
        raise ModelError(
            f"{header.path}: latent attention with a temperature that grows (as in Mistral Large 3) is not "
            "supported; take another model"
        )
    get, require = header.number, header.require
    if not get("expert_count", 0):
        raise ModelError(
            f"{header.path}: latent attention without experts is not supported; take another model"
        )
    corrected = any(name.endswith("exp_probs_b.bias") for name in shapes)
    gating = get("expert_gating_func", 0) or (SIGMOID if corrected else SOFTMAX)  # older files do not say
    if gating not in (SOFTMAX, SIGMOID):
        raise ModelError(f"{header.path}: expert_gating_func {gating} is not supported, only 1 and 2")
    rotated, groups = require("rope.dimension_count"), get("expert_group_count", 0) or 1
    own = gguf_glm.expert_config(header, config) | {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "kv_lora_rank": require("attention.kv_lora_rank"),
        "q_lora_rank": require("attention.q_lora_rank") if "blk.0.attn_q_a.weight" in shapes else None,
        "qk_rope_head_dim": rotated,
        # the sizes without _mla are those of keys and values in the cache, in files that have both
        "qk_nope_head_dim": (get("attention.key_length_mla") or require("attention.key_length")) - rotated,
        "v_head_dim": get("attention.value_length_mla") or require("attention.value_length"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": get("expert_group_used_count", 0) or groups,
    }
    if gating == SOFTMAX:
        return own | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return own | {"use_expert_bias": corrected}


def joined(
    header: Header, tensors: Mapping[str, Stored], config: Mapping[str, Any]
) -> dict[str, Stored | KeysAndValues]:
    """Tensors by Hugging Face's names, with the two parts of a matrix of keys and values as one.

    Raises `ModelError` for parts that do not fit each other.
    """
    found: dict[str, Stored | KeysAndValues] = dict(tensors)
    for name, keys in tensors.items():
        place = name.removesuffix("self_attn.k_b_proj.weight")
        values, whole = f"{place}self_attn.v_b_proj.weight", f"{place}self_attn.kv_b_proj.weight"
        if place == name or values not in tensors or whole in tensors:
            continue
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        expected = {
            name: (heads, rank, config["qk_nope_head_dim"]),
            values: (heads, config["v_head_dim"], rank),
        }
        for part, shape in expected.items():
            if tuple(tensors[part].shape) != shape:
                raise ModelError(
                    f"{header.path}: {part} {list(tensors[part].shape)} should be {list(shape)} by the "
                    "metadata; the file is damaged"
                )
        found[whole] = KeysAndValues(keys, tensors[values])
        del found[name], found[values]
    return found
