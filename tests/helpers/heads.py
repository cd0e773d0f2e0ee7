"""Checkpoints of drafters for the bundled model, with the weights that training starts from."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from soothsay.drafters.heads.checkpoints.directory import write_head
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.load import load_model
from soothsay.train import new_heads
from soothsay.train.sequences import TrainingKernels

MAKERS = {
    "medusa": lambda target: new_heads.medusa(target, heads=3),
    "hydra": lambda target: new_heads.hydra(target, heads=3),
    "eagle": new_heads.eagle,
    "eagle2": new_heads.eagle,
    "eagle3": lambda target: new_heads.eagle3(target, range(0, 8192, 3)),
    "mtp": new_heads.mtp,
    "block": lambda target: new_heads.block(target, size=4, layers=1, markov_rank=8),
}


@cache
def untrained(name: str, target: str = "sibyl") -> Path:
    """Write a checkpoint for drafter `name`. Its directory is removed when the process ends."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    model = load_model(open_checkpoint(target), "float32", kernels=TrainingKernels())
    write_head(MAKERS[name](model), directory / name, target)
    return directory / name
