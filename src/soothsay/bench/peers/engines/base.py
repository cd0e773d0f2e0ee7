"""What every engine gives, and the little that they share.

This package runs under any interpreter, without soothsay: `python -m engines NAME SETUP` with the folder
above on the path. So it imports nothing but the standard library and what an engine needs, and itself
relatively. All prompts are token ids, all decoding is greedy, end tokens end nothing, all times are seconds.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class UnavailableError(Exception):
    """The engine is not installed, or cannot do what is asked; the message says what to do about it."""


@dataclass(frozen=True)
class Setup:
    """What to load, and how it may run."""

    model: str  # a Hugging Face directory
    dtype: str  # of the weights
    threads: int
    context: int  # tokens of prompt and answer together, at most
    export: str = ""  # where the engine's own format of the model is, or goes
    lookup_tokens: int = 0  # guessed at once by prompt lookup; 0: what the engine's makers recommend
    drafter: str = "auto"  # soothsay's


class Peer(Protocol):
    """A model in one engine. Making one tells whether the engine is there; it raises `UnavailableError`."""

    version: str
    modes: tuple[str, ...]  # ways to generate, plain decoding first

    def __init__(self, setup: Setup): ...

    def load(self) -> None:
        """Load the model, for engines with a format of their own after exporting it: this takes minutes."""

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """Time of `count` steps of one token behind the prompt, and the `count + 1` tokens there."""

    def prompt(self, ids: list[int]) -> float:
        """Time of a prompt and one token."""

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """Times of a pass that gives logits of `rows` tokens behind the prompt; None: cannot be asked for."""

    def generate(self, ids: list[int], count: int, mode: str) -> tuple[float, list[int]]:
        """Time and tokens of an answer, the prompt's time included."""


def need(module: str, package: str = "") -> Any:
    """Import what an engine needs. Raises `UnavailableError` saying how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module
        raise UnavailableError(
            f"{package} is not installed ({error}): {sys.executable} -m pip install {package}"
        ) from error


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that `work` takes, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result
