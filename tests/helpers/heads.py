"""Checkpoints of drafters for the bundled model, with the weights that training starts from."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tiny import adapted

from soothsay.drafters.heads.checkpoints.block_configs import hf_config
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.heads.checkpoints.stored_head import block_names, split
from soothsay.drafters.heads.dflash import dflash_names
from soothsay.drafters.heads.dflash_head import DFlashConfig, DFlashHead
from soothsay.drafters.heads.draft_blocks import RowVisibility
from soothsay.drafters.heads.eagle3 import Eagle3Config, eagle3_names
from soothsay.drafters.heads.path_heads import MarkovHead
from soothsay.drafters.heads.peagle import PEagleConfig, PEagleHead
from soothsay.drafters.heads.trained_head import Head
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model
from soothsay.train import new_heads
from soothsay.train.examples import Example
from soothsay.train.sequences import TrainingKernels


def makers(vocabulary: range) -> dict[str, Callable[[Transformer], Head]]:
    """Functions that make each kind of head for a target. EAGLE-3's has a vocabulary of its own."""
    return {
        "medusa": lambda target: new_heads.medusa(target, heads=3),
        "hydra": lambda target: new_heads.hydra(target, heads=3),
        "eagle": new_heads.eagle,
        "eagle2": new_heads.eagle,
        "eagle3": lambda target: new_heads.eagle3(target, SOME, vocabulary),
        "mtp": new_heads.mtp,
        "block": lambda target: new_heads.block(target, SOME, size=4, cell=32),
        "redrafter": lambda target: new_heads.redrafter(target, SOME, size=4, hidden=64, cell=32),
    }


DFLASH = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 2]}
"""What the configuration of `random_dflash` says besides its decoder blocks."""


@cache
def random_dflash(markov: bool = False, target: str = "sibyl") -> Path:
    """Write a checkpoint of DFlash, or of DSpark, with random weights."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    c = read_model_config(open_checkpoint(target))
    block = adapted(c, num_layers=2, windows=(None, None), tie_embeddings=False)
    sizes = 8, c.hidden_size, c.vocab_size, c.vocab_size
    head = DFlashHead(
        DFlashConfig(block, (1, 3), 5, 3, (RowVisibility(), RowVisibility())),
        StockKernels(),
        MarkovHead("vanilla", *sizes, True) if markov else None,
    )
    names = {
        **dflash_names(2),
        "path_head.tokens": ("markov_head.markov_w1",),
        "path_head.next": ("markov_head.markov_w2",),
    }
    save_file(dict(split(head, names)), directory / "model.safetensors")
    options = {**hf_config(block), "dflash_config": DFLASH}
    (directory / "config.json").write_text(json.dumps(options))
    return directory


@cache
def random_peagle(target: str = "sibyl") -> Path:
    """Write a checkpoint of P-EAGLE with two decoder blocks and random weights."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    c = read_model_config(open_checkpoint(target))
    block = adapted(c, num_layers=2, windows=(None, None), tie_embeddings=False)
    size = min(2000, c.vocab_size - 3)
    first = Eagle3Config(block, c.hidden_size, size, (1, 2, 3))
    head = PEagleHead(PEagleConfig(first, 3, 8), StockKernels())
    head.d2t += 3
    names = {**eagle3_names("midlayer."), **block_names("more.0.", "layers.1.")}
    save_file(dict(split(head, names, block)), directory / "model.safetensors")
    taps = {"eagle_aux_hidden_state_layer_ids": list(first.taps)}
    options = {**hf_config(block), **taps, "ptd_token_id": 3, "draft_vocab_size": size}
    (directory / "config.json").write_text(json.dumps(options))
    return directory


SOME = [Example(np.arange(40), np.arange(40) > 9)]


def write_assistant(target: ModelSpec, directory: Path, **settings: Any) -> Any:
    """Write a random assistant of two layers for a target; returns transformers' model of it.

    Its layers have windows where layers of the target have some.
    """
    parts = target.parts(AttentionSpec)
    last = {is_global: parts[layer] for is_global, layer in target.last_kv_layers.items()}
    wide, narrow = last[True], last.get(False, last[True])
    kinds = ["sliding_attention" if False in last else "full_attention", "full_attention"]
    text = transformers.Gemma4TextConfig(
        vocab_size=target.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2 * wide.kv_heads * narrow.kv_heads,
        num_key_value_heads=narrow.kv_heads,
        head_dim=narrow.size,
        global_head_dim=wide.size,
        attention_k_eq_v=True,
        num_global_key_value_heads=wide.kv_heads,
        layer_types=kinds,
        sliding_window=next((window for window in target.windows if window is not None), 512),
        max_position_embeddings=target.max_positions,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=target.hidden_size, **settings
    )
    model = transformers.Gemma4AssistantForCausalLM._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for key, value in model.state_dict().items():  # parameters and layer_scalar
        noise = torch.randn(value.shape, generator=generator)
        if "token_ordering" in key:
            value.copy_(torch.randperm(len(value), generator=generator))
        elif value.ndim == 1:
            value.copy_(1 + 0.3 * noise)
        else:
            value.copy_(noise * value.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return model


@cache
def untrained(name: str, target: str = "sibyl") -> Path:
    """Write a checkpoint for drafter `name`. Its directory is removed when the process ends."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    model = load_model(open_checkpoint(target), "float32", kernels=TrainingKernels())
    if name == "assistant":
        write_assistant(model.spec, directory / name)
        return directory / name
    write_head(makers(range(0, 8192, 3))[name](model), directory / name, target)
    return directory / name
