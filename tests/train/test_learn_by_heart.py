"""Heads that learn two conversations by heart: the engine accepts more of their draft tokens than before.

Where there is a GPU, they learn and draft there too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soothsay import LLM, Drafter, SamplingParams
from soothsay.drafters.heads.block import BlockDrafter
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.heads.eagle import Eagle2
from soothsay.drafters.heads.eagle3 import Eagle3
from soothsay.drafters.heads.hydra import Hydra
from soothsay.drafters.heads.medusa import Medusa
from soothsay.drafters.heads.mtp import MTP
from soothsay.drafters.heads.redrafter import Redrafter
from soothsay.drafters.heads.trained_head import Head
from soothsay.model.transformer import Transformer
from soothsay.train import new_heads
from soothsay.train.evaluate import mean_accepted, measuring
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

Make = Callable[..., Transformer]

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
LENGTH = 32
DEPTH = 3
STEPS = 40
CONFIG = TrainingConfig(
    steps=STEPS,
    batch_tokens=2 * (6 + LENGTH),  # both conversations
    parts=1,
    learning_rate=3e-3,
    matrix_learning_rate=2e-2,
    evaluate_every=STEPS,
    save_every=STEPS,
)

SOME = [Example(np.arange(40), np.arange(40) > 9)]

Method = tuple[type[HeadRecipe], Callable[[Transformer], Head], Callable[..., Drafter], dict[str, Any]]

METHODS: dict[str, Method] = {
    "medusa": (MedusaRecipe, lambda target: new_heads.medusa(target, DEPTH, layers=2), Medusa, {}),
    "hydra": (HydraRecipe, lambda target: new_heads.hydra(target, DEPTH), Hydra, {}),
    "eagle": (RecurrentRecipe, new_heads.eagle, Eagle2, {"depth": DEPTH, "regression": 0.5}),
    "eagle3": (
        RecurrentRecipe,
        lambda target: new_heads.eagle3(target, SOME, range(97)),
        Eagle3,
        {"depth": DEPTH},
    ),
    "mtp": (RecurrentRecipe, new_heads.mtp, MTP, {"depth": DEPTH}),
    "block": (BlockRecipe, lambda target: new_heads.block(target, SOME, DEPTH, cell=32), BlockDrafter, {}),
    "redrafter": (
        RedrafterRecipe,
        lambda target: new_heads.redrafter(target, SOME, DEPTH, 48, 32),
        Redrafter,
        {},
    ),
}


GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: PyTorch finds none")
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", METHODS)
def test_training_on_two_conversations_raises_acceptance(
    name: str, device: str, tiny: Make, tmp_path: Path
) -> None:
    """The acceptance length is about 1 before, for no draft token is right; three draft tokens make it 4."""
    kind, make, drafter, options = METHODS[name]
    target = tiny(0).to(device)
    llm = LLM(target, drafter="none", config=measuring(max_tree=DEPTH + 1), kv_tokens=512)
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    answers = [llm.generate(prompt, params).token_ids for prompt in PROMPTS]
    assert all(len(set(answer)) > LENGTH / 2 for answer in answers), "answers that hardly repeat tokens"
    examples = [
        Example(np.array(prompt + answer), np.arange(len(prompt + answer)) >= len(prompt))
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]

    def evaluate(directory: Path) -> dict[str, float]:
        built = lambda served: drafter(served, directory)  # noqa: E731
        return {"score": mean_accepted(llm, built, PROMPTS, max_tokens=LENGTH)}

    def save(head: Head, directory: Path) -> None:
        write_head(head, directory, "tiny")

    trained = Transformer(target.spec, TrainingKernels()).to(device)
    trained.load_state_dict(target.state_dict())
    torch.manual_seed(0)
    head = make(trained)
    initial = copy.deepcopy(head.to(device).state_dict())
    save(head, tmp_path / "untrained")
    recipe = kind(trained, head, evaluate, save, anchors=1.0, **options)
    Trainer(recipe, examples, CONFIG, tmp_path / name).run(lambda step, measured: None)
    before, after = (evaluate(tmp_path / which)["score"] for which in ("untrained", name))
    assert before < 1.2
    assert after > before + 0.6
    for parameter, weights in head.named_parameters():
        trainable = weights.requires_grad  # scales of features are measured
        assert torch.equal(weights, initial[parameter]) != trainable, f"{parameter} has not been trained"
    for parameter, weights in trained.state_dict().items():
        assert torch.equal(weights, target.state_dict()[parameter]), f"the target's {parameter} has changed"
