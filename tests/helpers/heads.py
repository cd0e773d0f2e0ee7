"""Checkpoints of drafters for the bundled model, with the weights that training starts from."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from soothsay.drafters.heads.checkpoints.blocks import hf_config
from soothsay.drafters.heads.checkpoints.dflash import dflash_names
from soothsay.drafters.heads.checkpoints.directory import write_head
from soothsay.drafters.heads.checkpoints.eagle import eagle3_names
from soothsay.drafters.heads.checkpoints.names import block_names, split
from soothsay.drafters.heads.modules.dflash import DFlashConfig, DFlashHead
from soothsay.drafters.heads.modules.eagle3 import Eagle3Config
from soothsay.drafters.heads.modules.path_heads import MarkovHead
from soothsay.drafters.heads.modules.peagle import PEagleConfig, PEagleHead
from soothsay.drafters.trees.draft_blocks import Sight
from soothsay.model.checkpoint import open_checkpoint, read_model_config
from soothsay.model.kernels import StockKernels
from soothsay.model.load import load_model
from soothsay.train import new_heads
from soothsay.train.examples import Example
from soothsay.train.sequences import TrainingKernels

MAKERS = {
    "medusa": lambda target: new_heads.medusa(target, heads=3),
    "hydra": lambda target: new_heads.hydra(target, heads=3),
    "eagle": new_heads.eagle,
    "eagle2": new_heads.eagle,
    "eagle3": lambda target: new_heads.eagle3(target, range(0, 8192, 3)),
    "mtp": new_heads.mtp,
    "block": lambda target: new_heads.block(target, size=4, layers=1, markov_rank=8),
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
    block = replace(c, num_layers=2, windows=(None, None), tie_embeddings=False)
    sizes = 8, c.hidden_size, c.vocab_size, c.vocab_size
    head = DFlashHead(
        DFlashConfig(block, (1, 3), 5, 3, (Sight(), Sight())),
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
    block = replace(c, num_layers=2, windows=(None, None), tie_embeddings=False)
    first = Eagle3Config(block, c.hidden_size, 2000, (1, 2, 3))
    head = PEagleHead(PEagleConfig(first, 3, 8), StockKernels())
    head.first.d2t += 3
    names = {f"first.{ours}": theirs for ours, theirs in eagle3_names("midlayer.").items()}
    names |= {"first.d2t": ("d2t",), **block_names("more.0.", "layers.1.")}
    save_file(dict(split(head, names, block)), directory / "model.safetensors")
    taps = {"eagle_aux_hidden_state_layer_ids": list(first.taps)}
    options = {**hf_config(block), **taps, "ptd_token_id": 3, "draft_vocab_size": 2000}
    (directory / "config.json").write_text(json.dumps(options))
    return directory


SOME = [Example(np.arange(40), np.arange(40) > 9)]


@cache
def untrained(name: str, target: str = "sibyl") -> Path:
    """Write a checkpoint for drafter `name`. Its directory is removed when the process ends."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    model = load_model(open_checkpoint(target), "float32", kernels=TrainingKernels())
    write_head(MAKERS[name](model), directory / name, target)
    return directory / name
