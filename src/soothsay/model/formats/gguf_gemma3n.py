"""What GGUF files of Gemma 3n have: names of tensors, and keys of its streams and layers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from soothsay.errors import ModelError
from soothsay.model.families.gemma4 import GLOBAL, LOCAL
from soothsay.model.formats.gguf_config import Header

OUTER_NAMES = {  # {} stands for the number in a stack
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}


def own_config(
    header: Header, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The keys of config.json that only Gemma 3n has. `shapes` are those of the tensors by GGUF's names."""
    get, layers = header.number, int(config["num_hidden_layers"])
    local = header.layers("attention.sliding_window_pattern", layers)
    table, laurel = (
        shapes.get(name, (0,))[0] for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    )
    if not table or not laurel:
        raise ModelError(f"{header.path} has no embeddings for layers, or no laurel_l; it is damaged")
    return {
        "layer_types": [LOCAL if is_local else GLOBAL for is_local in local],
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "sliding_window": header.require("attention.sliding_window"),
        "rope_local_base_freq": get("rope.freq_base_swa", 1e4),
        "hidden_size_per_layer_input": header.require("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table,
        "altup_num_inputs": header.require("altup.num_inputs"),
        "altup_active_idx": get("altup.active_idx", 0),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in shapes,
        "laurel_rank": laurel,
        "activation_sparsity_pattern": _sparsity(header, layers),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
    }


def _sparsity(header: Header, layers: int) -> list[float]:
    """The share of gates that become zero. The file has the standard deviations above the mean instead."""
    key = f"{header.architecture}.activation_sparsity_scale"
    found = header.metadata.get(key)
    values = found.tolist() if isinstance(found, np.ndarray) else found
    values = values if isinstance(values, list) else []
    if len(values) != layers or not all(
        isinstance(value, float) and value < 4 for value in values
    ):  # false for NaN
        raise ModelError(f"{header.path}: {key} {values!r:.80} of {layers} layers is damaged")
    return [NormalDist().cdf(value) for value in values]
