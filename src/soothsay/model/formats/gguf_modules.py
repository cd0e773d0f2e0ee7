"""MTP modules in GGUF files: the blocks after the model's own, and what stands before and after each.

llama.cpp's converter counts modules as further blocks, and writes their number as `nextn_predict_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.model.formats.gguf_config import Header

QWEN = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
    "nextn.embed_tokens": "mtp.embed_tokens",
    "nextn.shared_head_head": "mtp.shared_head.head",
}
GLM = {
    "nextn.eh_proj": "model.layers.{}.eh_proj",
    "nextn.enorm": "model.layers.{}.enorm",
    "nextn.hnorm": "model.layers.{}.hnorm",
    "nextn.shared_head_norm": "model.layers.{}.shared_head.norm",
    "nextn.embed_tokens": "model.layers.{}.embed_tokens",
    "nextn.shared_head_head": "model.layers.{}.shared_head.head",
}
"""Parts of a module beside its block, as Hugging Face's checkpoints name them. {} stands for the block."""

FAMILIES = {
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next_gguf": QWEN,
    "glm4_moe": GLM,
    "deepseek_v3": GLM,
    "nemotron_h": GLM,
}


def module_number(header: Header, block: str, config: Mapping[str, Any]) -> int | None:
    """The number of a block among the MTP modules, from 0. None: the block is one of the model's own."""
    if header.family not in FAMILIES or not header.number("nextn_predict_layers", 0):
        return None
    number = int(block[:9]) - int(config["num_hidden_layers"]) if block.isdecimal() else -1
    return number if number >= 0 else None


def module_names(header: Header, block: str, number: int) -> tuple[dict[str, str], str]:
    """Names of the parts of a module beside its block, and the prefix of the block's tensors."""
    names = FAMILIES[header.family]
    place = f"mtp.layers.{number}" if names is QWEN else f"model.layers.{block}"
    return {part: name.format(block) for part, name in names.items()}, place
