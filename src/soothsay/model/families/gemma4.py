"""How the text part of a Gemma 4 `config.json` becomes a `ModelConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soothsay.config import ExpertsConfig, HeadsConfig, ModelConfig
from soothsay.errors import ModelError

LOCAL, GLOBAL = "sliding_attention", "full_attention"

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 1,  # scores are not scaled
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
"""What published files leave out, since it equals transformers' defaults."""

UNIFIED_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def with_layer_types(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a type for each layer. The last layer never has a window."""
    layers = int(raw["num_hidden_layers"])
    kinds = list(raw.get("layer_types") or (LOCAL if (i + 1) % 6 else GLOBAL for i in range(layers)))
    kinds[-1:] = [GLOBAL]
    return {**raw, "layer_types": kinds}


def finished(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The configuration with the fields that only Gemma 4 has.

    Raises `ModelError` if the layers' heads do not fit each other.
    """
    shared = check_shared_layers(raw, config)
    size = int(raw.get("hidden_size_per_layer_input", 0))
    if size and int(raw.get("vocab_size_per_layer_input", config.vocab_size)) != config.vocab_size:
        raise ModelError("config.json: vocab_size_per_layer_input differs from vocab_size")
    return replace(
        config,
        value_norm=True,
        global_heads=_global_heads(raw, config),
        num_shared_kv_layers=shared,
        wide_shared_kv_layers=bool(raw.get("use_double_wide_mlp", False)),
        layer_embedding_size=size or None,
        layer_scalars=True,
        experts=_experts(raw, config.num_layers) if raw.get("enable_moe_block") else None,
    )


def check_shared_layers(raw: Mapping[str, Any], config: ModelConfig) -> int:
    """How many of the last layers read the keys and values of layers before them.

    Raises `ModelError` if there is no such layer.
    """
    shared = int(raw.get("num_kv_shared_layers", 0))
    own = config.windows[: config.num_layers - shared]
    missing = {window is None for window in config.windows} - {window is None for window in own}
    if shared >= config.num_layers or missing:
        raise ModelError(
            f"config.json: the last {shared} of {config.num_layers} layers share keys and values "
            "(num_kv_shared_layers), and no layer before them has the same type"
        )
    return shared


def _global_heads(raw: Mapping[str, Any], config: ModelConfig) -> HeadsConfig:
    """The heads of layers without a window."""
    is_key = bool(raw.get("attention_k_eq_v", False))
    own = raw.get("per_layer_config")
    if own is None:
        size, count = raw["global_head_dim"], raw.get("num_global_key_value_heads") if is_key else None
    else:  # as transformers 5 writes it: by the number of a layer, what differs from the rest
        size, count = _layer_values(own, config)
    heads = HeadsConfig(int(count or config.num_kv_heads), int(size), is_key)
    if config.num_heads % heads.count or heads.size % 2:
        raise ModelError(
            f"config.json: in layers without a window, {config.num_heads} attention heads cannot share "
            f"{heads.count} key-value heads of {heads.size} dimensions"
        )
    return heads


def _layer_values(own: Any, config: ModelConfig) -> tuple[int, int]:
    """Size and number of key-value heads in layers without a window, from `per_layer_config`.

    Its keys are numbers of layers. With eleven layers or more, transformers writes "05" for 5.
    """
    entries = own.items() if isinstance(own, Mapping) else ()
    by_layer = {int(key): values for key, values in entries if re.fullmatch("[0-9]{1,9}", key)}
    mappings = [values for values in by_layer.values() if isinstance(values, Mapping)]
    if not isinstance(own, Mapping) or len(mappings) != len(own):
        raise ModelError("config.json: per_layer_config is not a mapping from layers to their values")
    found = set()
    for layer, window in enumerate(config.windows):
        values = by_layer.get(layer, {})
        size = values.get("head_dim", config.head_dim)
        count = values.get("num_key_value_heads", config.num_kv_heads)
        if any(not isinstance(x, int) or not 1 <= x <= 65_536 for x in (size, count)):
            raise ModelError(
                f"config.json: per_layer_config of layer {layer} is not possible: {values!r:.80}"
            )
        if window is None:
            found.add((size, count))
        elif (size, count) != (config.head_dim, config.num_kv_heads):
            raise ModelError(
                f"config.json: per_layer_config of layer {layer}, which has a window, differs from the others"
            )
    if len(found) != 1:
        raise ModelError("config.json: per_layer_config differs among layers without a window")
    return found.pop()


def _experts(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    count, chosen = int(raw["num_experts"]), int(raw["top_k_experts"])
    if not 1 <= chosen <= count:
        raise ModelError(f"config.json: top_k_experts is {chosen}, and there are {count} experts")
    size = int(raw["moe_intermediate_size"])
    return ExpertsConfig(count, chosen, size, tuple(range(layers)), beside_dense=True)
