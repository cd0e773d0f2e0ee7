"""The numbers of a training, which are options of its command too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from soothsay.options import option

training_option = partial(option, panel="Training")
"""An option of every training command."""

WARMUP = 0.02
"""Share of the steps, at the beginning, in which the learning rates rise."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The numbers of a training."""

    steps: int = training_option(1000, min=1)
    """Optimizer steps in total. A training that resumes goes on to this number."""

    batch_tokens: int = training_option(8192, min=16)
    """Tokens of a step.

    Padding is included."""

    parts: int = training_option(2, min=1)
    """Passes of a step. More passes need less memory."""

    learning_rate: float = training_option(1e-3, min=0)
    """Learning rate of embeddings, norms and output matrices.

    They are trained by AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101)."""

    matrix_learning_rate: float = training_option(3e-3, min=0)
    """Learning rate of matrices within layers.

    They are trained by Muon (Jordan et al. 2024), scaled like AdamW."""

    decay: float = training_option(0.8, min=0, max=1)
    """Share of the steps, at the end, in which the learning rates fall."""

    evaluate_every: int = training_option(200, min=1)
    """Steps between evaluations."""

    save_every: int = training_option(100, min=1)
    """Steps between checkpoints."""

    seed: int = training_option(0)
    """Seed of shuffling and of new weights."""

    compiled: bool = training_option(False)
    """Compile decoder blocks: minutes that pay in a long training on a GPU."""

    def rate(self, step: int) -> float:
        """The factor of the learning rates in `step`, from 0 to 1."""
        warmup, decay = max(WARMUP * self.steps, 1), max(self.decay * self.steps, 1)
        return min(1.0, (step + 1) / warmup, (self.steps - step) / decay)
