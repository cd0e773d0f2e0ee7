"""Random LoRA adapters as PEFT writes them, and the models of transformers that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def matrices(
    weights: Mapping[str, Tensor],
    targets: Collection[str] = LINEARS,
    rank: int = 8,
    seed: int = 0,
    size: float = 1.0,
) -> dict[str, Tensor]:
    """Random matrices for the layers whose names end with one of `targets`, by their names in a file.

    Their product times 2 is about `size` times as large as a weight usually is.
    """
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name in sorted(weights):
        if re.fullmatch(rf".*\.({'|'.join(targets)})\.weight", name):
            (out, inputs), stem = weights[name].shape, PREFIX + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * (
                size / 2 / rank**0.5
            )
    return tensors


def write_adapter(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write an adapter. Its rank is 8 and its alpha 16, unless `config` says otherwise."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": [*LINEARS]}
    (path / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    return path


def adapter_of(model: Path, path: Path, **given: Any) -> Path:
    """Write a random adapter of a model in a directory; `given`: of `matrices`."""
    return write_adapter(path, matrices(load_file(model / "model.safetensors"), **given))


@torch.no_grad()
def merge(oracle: torch.nn.Module, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
    """Add the products of matrices to a model's weights. `scales`: by the ends of names; "": others."""
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            scale = next(scale for end, scale in scales.items() if layer.endswith(end))
            product = tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
            oracle.get_submodule(layer).weight += (scale * product).float()  # type: ignore[operator]
