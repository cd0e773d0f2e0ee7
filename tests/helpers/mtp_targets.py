"""Random targets whose checkpoints have a random MTP module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from families import random_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.")
GLM = tuple(f"model.layers.3.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""))
"""Names of the projection, the norms of embedding, hidden state and output, and the block's prefix."""


TARGETS = ("qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "glm4_moe")


def save_with_mtp(
    directory: Path, name: str, *, stacked: bool = False, **changes: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Save a random target whose checkpoint has a random MTP module; return its tensors, and the oracle.

    `stacked`: experts are stacked as in the family's published files, else one by one.
    """
    oracle = random_oracle(name, max_position_embeddings=256, **changes)
    oracle.save_pretrained(directory)
    fc, *norms, block = GLM if name == "glm4_moe" else QWEN
    generator = torch.Generator().manual_seed(5)
    hidden = oracle.config.hidden_size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    module = {f"{norm}.weight": random(hidden) for norm in norms}
    module[f"{fc}.weight"] = random(hidden, 2 * hidden)
    for key, tensor in full_layer(oracle).state_dict().items():
        module[block + key] = random(*tensor.shape)
    weights = load_file(directory / "model.safetensors")
    saved = module if stacked else dict(one_by_one(module))
    save_file(weights | saved, directory / "model.safetensors", metadata={"format": "pt"})
    return oracle, module


def full_layer(oracle: Any) -> Any:
    """A layer of the kind that modules have."""
    kinds = getattr(oracle.config, "layer_types", None) or ["full_attention"] * 3
    return oracle.model.layers[-1 - kinds[::-1].index("full_attention")]


def one_by_one(module: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module, with a name for each expert's matrices."""
    for name, tensor in module.items():
        stem, _, part = name.partition(".experts.")
        for expert, matrix in enumerate(tensor if part else []):
            halves = {"gate_proj": 0, "up_proj": 1} if part == "gate_up_proj" else {part: 0}
            for half, place in halves.items():
                yield f"{stem}.experts.{expert}.{half}.weight", matrix.chunk(len(halves))[place].contiguous()
        if not part:
            yield name, tensor


NEXTN = {  # parts of a module in GGUF files
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}


def in_module(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Tensors with those of an MTP module as a further layer, as llama.cpp's converter names them."""
    renamed = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        block = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
        renamed[f"blk.{layers}.nextn.{NEXTN[stem]}.{suffix}" if stem in NEXTN else block] = tensor
    return renamed
