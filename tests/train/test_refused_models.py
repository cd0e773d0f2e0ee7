"""Models that cannot be trained say so, rather than learn something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families import random_oracle

from soothsay.errors import TrainingError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.examples import Example
from soothsay.train.sequences import Sequences, TrainingKernels, head_weight


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    random_oracle("phi").save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), "float32", kernels=TrainingKernels())
    with pytest.raises(TrainingError, match="'phi' cannot be trained"):
        head_weight(model)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_layers_that_keep_states(family: str, tmp_path: Path) -> None:
    random_oracle(family).save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), "float32", kernels=TrainingKernels())
    batch = Sequences.of([Example(np.arange(4), np.arange(4) > 1)])
    with pytest.raises(TrainingError, match="keep states cannot be trained"):
        model(batch, None)
