"""Models that many tests share: the bundled one, and random ones small enough to do anything with."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path

import certifi
import pytest
import torch
from hypothesis import HealthCheck, settings
from places import ROOT, find_shared
from tiny import TINY, adapted
from typer import testing

from soothsay import LLM
from soothsay.model.timing import known_times, pass_measuring
from soothsay.model.transformer import Transformer

pytest_plugins = ["skips", "shares"]

# no test depends on how fast the machine is
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure() -> None:
    """Let Triton's interpreter run kernels, unless a device does. Triton reads it when it is imported."""
    if not os.environ.get("SOOTHSAY_DEVICE"):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are imported: a third of that time, for objects that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection: looking at 800,000 objects takes 0.4 s each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small gain nothing from more, and lose much where another process has a core."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Let a test draw the same random numbers wherever it runs, and after whichever tests.

    `torch.manual_seed` takes over a hundred times as long: it notes for devices which code called it.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give tests a cache of their own: their measurements must not reach the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trust one authority: each new client of `httpx` takes 20 ms to read all, and no test speaks TLS."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = Path(certifi.where()).read_text().partition(begin)[2].partition(end)[0]
    file = tmp_path_factory.mktemp("certificates") / "first.pem"
    file.write_text(f"{begin}{first}{end}\n")
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(scope="session", autouse=True)
def _commands_once() -> None:
    """Build each command line once, and not each time that it runs."""
    testing._get_command = functools.cache(testing._get_command)


@pytest.fixture(scope="session", autouse=True)
def _few_passes() -> None:
    """Measure 6 passes for a controller, in place of 30, which take longer than most tests.

    They are kept, though another worker tests meanwhile. Else each start would measure them.
    """
    pass_measuring.ROWS, pass_measuring.CONTEXTS, pass_measuring.BRIEF_ROWS = (1, 16, 64), (64,), (1, 16)
    pass_measuring.SETTLING = pass_measuring.COUNTED = 1
    known_times.processor_seconds_of_others = lambda: None


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Transformer]:
    """Makes a random model: `tiny(seed, **changes of the configuration)`."""

    def make(seed: int = 0, **changes: object) -> Transformer:
        torch.manual_seed(seed)
        model = Transformer(adapted(TINY, **changes)).eval().requires_grad_(False)
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
    """The folder of data beside a development checkout, or the one that `SOOTHSAY_SHARED` names."""
    folder = find_shared(ROOT, os.environ.get("SOOTHSAY_SHARED"))
    if folder is None:
        pytest.skip(f"no shared data: {ROOT.parent / 'shared'} is not there")
    return folder
