"""Sizes that the `text_config` of a multimodal model leaves out, since they are its class's defaults.

LLaVA-1.5 names only what differs from transformers' `LlamaConfig`. A whole model's config.json names all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.model.families.layer_fields import Raw

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

SIZES: Mapping[str, tuple[tuple[int | None, ...], Mapping[str, Any]]] = {
    "llama": ((32_000, 4096, 11_008, 32, 32, None, 2048), {}),
    "mistral": ((32_000, 4096, 14_336, 32, 32, 8, 131_072), {"sliding_window": 4096}),
    "qwen2": ((151_936, 4096, 22_016, 32, 32, 32, 32_768), {"sliding_window": 4096}),
    "qwen3": ((151_936, 4096, 22_016, 32, 32, 32, 32_768), {"head_dim": 128, "sliding_window": 4096}),
    "phi3": ((32_064, 3072, 8192, 32, 32, None, 4096), {"rms_norm_eps": 1e-5}),
    "granite": ((32_000, 4096, 11_008, 32, 32, None, 2048), {}),
    "smollm3": ((128_256, 2048, 11_008, 36, 16, 4, 32_768), {}),
    "cohere": ((256_000, 8192, 22_528, 40, 64, None, 8192), {"rope_theta": 5e5}),
    "cohere2": ((256_000, 8192, 22_528, 40, 64, None, 8192), {"sliding_window": 4096}),
}
"""By `model_type`: transformers' defaults of `KEYS`, and of what else a model of this class needs."""


def completed(text: Raw) -> Raw:
    """A `text_config` with the sizes that it leaves out. A key that is null stays so."""
    sizes, more = SIZES.get(str(text.get("model_type")), ((), {}))
    return {**dict(zip(KEYS, sizes, strict=False)), **more, **text}
