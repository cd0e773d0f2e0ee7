"""Random models of gpt-oss with experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import random_oracle, read_config, write_config
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


@torch.no_grad()
def quantized_oracle(directory: Path, **sizes: int) -> Any:
    """Save a random gpt-oss with experts in MXFP4. Return transformers' model with their values."""
    oracle = random_oracle("gpt_oss", **sizes)
    oracle.save_pretrained(directory)
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(3)
    for layer, block in enumerate(oracle.model.layers):
        for part, largest in (("gate_up_proj", 125), ("down_proj", 121)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            experts, inputs, outputs = tensors.pop(name).shape
            shape = experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(largest - 3, largest, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(block.mlp.experts, part).copy_(plain)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write_config(directory, {**read_config(directory), "quantization_config": settings})
    return oracle
