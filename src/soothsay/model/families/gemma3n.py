"""How the text part of a Gemma 3n `config.json` becomes a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soothsay.config import AlternatingConfig, ModelConfig
from soothsay.errors import ModelError
from soothsay.model.families.gemma4 import check_shared_layers

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 1,  # scores are not scaled
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
}
"""What published files leave out, since it equals transformers' defaults."""


def rewritten(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration itself. Raises `ModelError` if layers do not compute the first part of the stream."""
    if raw.get("altup_active_idx", 0) != 0:
        raise ModelError("config.json: altup_active_idx is supported only as 0")
    return raw


def finished(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The configuration with the fields that only Gemma 3n has. Raises `ModelError`."""
    layers = config.num_layers
    sparsity = raw.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    if len(sparsity) != layers:
        raise ModelError(
            f"config.json: activation_sparsity_pattern has {len(sparsity)} entries for {layers} layers"
        )
    return replace(
        config,
        value_norm=True,
        num_shared_kv_layers=check_shared_layers(raw, config),
        layer_embedding_size=int(raw["hidden_size_per_layer_input"]),
        layer_vocab_size=int(raw["vocab_size_per_layer_input"]),
        alternating=AlternatingConfig(
            parts=int(raw.get("altup_num_inputs", 4)),
            scaled=bool(raw.get("altup_correct_scale", True)),
            laurel_rank=int(raw.get("laurel_rank", 64)),
            sparsity=tuple(map(float, sparsity)),
        ),
    )
