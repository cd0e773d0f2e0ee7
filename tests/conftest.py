"""Models that many tests share: the bundled one, and random ones small enough to do anything with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TINY

from soothsay import LLM
from soothsay.model.transformer import Transformer

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small gain nothing from more, and lose much where another process has a core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests measure on a busy machine is not for its user."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Transformer]:
    """Makes a random model: `tiny(seed, **changes of the configuration)`."""

    def make(seed: int = 0, **changes: object) -> Transformer:
        torch.manual_seed(seed)
        model = Transformer(replace(TINY, **changes)).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3.0)  # sharper distributions than a fresh model's
        return model

    return make


@pytest.fixture(scope="session")
def sibyl() -> LLM:
    """The bundled model in float32, without a drafter."""
    return LLM("sibyl", dtype="float32", drafter="none", kv_tokens=16_384)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data that stands beside a development checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here; it stands beside development checkouts only")
    return SHARED
