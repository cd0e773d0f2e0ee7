"""Trained drafters' checkpoints with the weights that training begins with, for the bundled model."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from soothsay.drafters.checkpoints import write_head
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.load import load_model
from soothsay.train import new
from soothsay.train.sequences import TrainingKernels

MAKERS = {
    "medusa": lambda target: new.medusa(target, heads=3),
    "hydra": lambda target: new.hydra(target, heads=3),
    "eagle": new.eagle,
    "eagle2": new.eagle,
    "eagle3": lambda target: new.eagle3(target, range(0, 8192, 3)),
    "mtp": new.mtp,
    "block": lambda target: new.block(target, size=4, layers=1, markov_rank=8),
}


@cache
def untrained(name: str, target: str = "sibyl") -> Path:
    """A directory for drafter `name`, removed when the process ends."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    torch.manual_seed(0)
    model = load_model(open_checkpoint(target), "float32", kernels=TrainingKernels())
    write_head(MAKERS[name](model), directory / name, target)
    return directory / name
