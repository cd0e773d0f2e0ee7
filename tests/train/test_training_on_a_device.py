"""Training on a device that refuses tensors of the host among its own, and how often a step waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which reads what the fixture replaces
from counting_device import DEVICE, CountingDevice
from heads import makers

from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.examples import Example
from soothsay.train.heads import (
    BlockRecipe,
    HeadRecipe,
    HydraRecipe,
    MedusaRecipe,
    RecurrentRecipe,
    RedrafterRecipe,
)
from soothsay.train.sequences import TrainingKernels
from soothsay.train.trainer import Trainer
from soothsay.train.training_config import TrainingConfig

RECIPES: dict[str, type[HeadRecipe]] = {
    "medusa": MedusaRecipe,
    "hydra": HydraRecipe,
    "eagle": RecurrentRecipe,
    "eagle3": RecurrentRecipe,
    "mtp": RecurrentRecipe,
    "block": BlockRecipe,
    "redrafter": RedrafterRecipe,
}
WAITS = 18
"""The host has to know how many rows each divergence takes: two waits. A recipe computes seven at most."""


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no types and no noise of this device. The state's file needs real addresses."""
    autocast, generator = torch.autocast, torch.Generator
    monkeypatch.setattr(torch, "autocast", lambda _, dtype: autocast("cpu", dtype))
    monkeypatch.setattr(torch, "Generator", lambda *_: generator())
    monkeypatch.setattr(Trainer, "save", lambda _: None)


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(one, marks=pytest.mark.slow) for one in RECIPES if one != "eagle3")]
)
def test_a_step_of_training_waits_a_few_times(method: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    examples = [Example(noise.integers(0, 200, 40), np.arange(40) > 9) for _ in range(4)]
    config: dict[str, Any] = {"steps": 2, "batch_tokens": 80, "parts": 1, "evaluate_every": 99}
    waits: list[int] = []
    with CountingDevice() as device:
        target = load_model(open_checkpoint("sibyl"), "float32", DEVICE, TrainingKernels())
        head = makers(range(0, 8192, 3))[method](target)
        recipe = RECIPES[method](target, head, lambda _: {"score": 0.0}, lambda *_: None)
        trainer = Trainer(recipe, examples, TrainingConfig(**config), tmp_path)
        trainer.run(lambda *_: waits.append(device.waits), stop_after=1)
        trainer.run(lambda *_: waits.append(device.waits))
    assert waits[1] - waits[0] <= WAITS
