"""A small Llama on the kernels of a GPU, in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401 - before any kernel
import torch
from safetensors.torch import save_file

from soothsay import LLM
from soothsay.model.gpu.gpu_kernels import GpuKernels
from soothsay.model.gpu.gpu_passes import GpuPasses
from soothsay.model.ops.kernels import Outputs
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

HIDDEN, VOCAB, UNITS = 64, 128, 96
PROMPT = [1, 5, 9, 5, 9, 7] * 3


def write_llama(path: Path, habit: float = 0.0, layers: int = 2) -> Path:
    """Write a Llama that repeats itself now and then.

    Args:
        path: a directory.
        habit: how strongly it goes on with the token seven after the last one, which a drafter can learn.
        layers: their number. The interpreter takes a second for a prompt and a layer.
    """
    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": UNITS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 1.7 * shape[-1] ** -0.5).bfloat16()

    table, head = weight(VOCAB, HIDDEN) * 5, weight(VOCAB, HIDDEN) * 2
    tensors = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": head + habit * table.roll(7, 0),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    shapes = {"q": (64, HIDDEN), "k": (32, HIDDEN), "v": (32, HIDDEN), "o": (HIDDEN, 64)}
    mlp = {"gate": (UNITS, HIDDEN), "up": (UNITS, HIDDEN), "down": (HIDDEN, UNITS)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.self_attn.{part}_proj.weight": weight(*shape) for part, shape in shapes.items()}
        tensors |= {f"{name}.mlp.{part}_proj.weight": weight(*shape) for part, shape in mlp.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def call_again(function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Record as a graph does: outputs stay where they are, and so does what the function reads."""
    hidden, taps, logits = function()

    def repeat() -> None:
        new_hidden, new_taps, new_logits = function()
        for own, new in zip((hidden, *taps, logits), (new_hidden, *new_taps, new_logits), strict=True):
            own.copy_(new)

    return repeat, (hidden, taps, logits)


def loaded(folder: Path, dtype: str = "bfloat16", *, recorded: bool = False) -> Transformer:
    """The model, computed by the interpreter."""
    kernels = GpuKernels("cpu")
    kernels.programs = 4  # each takes a millisecond
    kernels.passes = GpuPasses(call_again) if recorded else None
    return load_model(open_checkpoint(folder), dtype, "cpu", kernels)  # type: ignore[arg-type]


def serving(model: Transformer, **options: int) -> LLM:
    """An engine with room for a few requests."""
    sizes: dict[str, Any] = {"kv_tokens": 1024, "max_requests": 4} | options
    return LLM(model, drafter="none", **sizes)
