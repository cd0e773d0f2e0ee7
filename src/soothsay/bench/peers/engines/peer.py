"""The interface of every engine, and the helpers that engines share.

This package runs under any interpreter, also without soothsay: `python -m engines NAME SETUP`, with its
parent directory on the path. So it imports only the standard library, the packages of the engine, and its
own modules by relative imports.

Prompts are token ids. Decoding is greedy and does not stop at end tokens. Times are in seconds.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class UnavailableError(Exception):
    """The engine is not installed or does not support the setup. The message says what to do."""


@dataclass(frozen=True)
class Setup:
    """The model to load, and the conditions to run it under."""

    model: str  # a Hugging Face directory or a GGUF file
    dtype: str  # of the weights; for a GGUF file "auto"
    threads: int
    context: int  # maximum number of tokens of a prompt with its answer
    export: str = ""  # path of the model in the engine's own format; exported if it does not exist
    drafters: Sequence[str] = ("auto",)  # for soothsay only
    draft_model: str = ""  # for the speculation of the others; of the kind that `model` is
    device: str = "cpu"  # where the model runs, as PyTorch names it
    kernels: str = "auto"  # for soothsay only


class Peer(Protocol):
    """A model in one engine. The constructor raises `UnavailableError` if the engine cannot run."""

    version: str
    modes: tuple[str, ...]  # ways to generate, plain decoding first

    def __init__(self, setup: Setup): ...

    def load(self) -> None:
        """Load the model. Engines with their own format export it first, which takes minutes."""

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """Time `count` steps of one token each after the prompt.

        Returns the seconds and the `count + 1` tokens after the prompt. The first token comes with the prompt
        and is not timed.
        """

    def prompt(self, ids: list[int]) -> float:
        """Time a prompt and the first token after it, in seconds."""

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """Time a pass that computes the logits of `rows` tokens after the prompt, `times` times.

        Returns the seconds of each pass, or None if the engine offers no way to run one.
        """
        return None

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """Generate an answer of `count` tokens to each prompt, all in one batch.

        Raises `UnavailableError` if `mode` turns out to be impossible here.
        """
        raise UnavailableError("this engine gives no whole answers")

    def generate(self, ids: list[int], count: int, mode: str) -> tuple[float, list[int]]:
        """Answer one prompt. Returns the seconds, with the prompt's, and the tokens."""
        seconds, (answer,) = timed(lambda: self.answers([ids], count, mode))
        return seconds, answer


class SteppingPeer(Peer):
    """An engine whose passes are called one by one. `start` and `forward` return the likeliest next token."""

    def start(self, ids: list[int]) -> int:
        """Read a prompt, without anything before it."""
        raise NotImplementedError

    def forward(self, ids: list[int], keep: int = 1) -> int:
        """Run a pass over tokens after all that were read, with logits of the last `keep` of them."""
        raise NotImplementedError

    def forget(self, count: int) -> None:
        """Drop the keys and values of the last `count` tokens."""
        raise NotImplementedError

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        tokens = [self.start(ids)]

        def run() -> None:
            for _ in range(count):
                tokens.append(self.forward(tokens[-1:]))

        return timed(run)[0], tokens

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        return timed(lambda: self.start(ids))[0]

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """See `Peer`."""
        self.start(ids)

        def once() -> float:
            seconds, _ = timed(lambda: self.forward(ids[:rows], rows))
            self.forget(rows)
            return seconds

        return [once() for _ in range(1 + times)][1:]


def need(module: str, package: str = "") -> Any:
    """Import a module that an engine needs. Raises `UnavailableError`, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module
        raise UnavailableError(
            f"{package} is not installed ({error}): {sys.executable} -m pip install {package}"
        ) from error


def padded(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that are padded on the left to the length of the longest one, and 1 at each of their tokens."""
    longest = max(map(len, prompts))
    pads = [[0] * (longest - len(ids)) for ids in prompts]
    marks = [pad + [1] * len(ids) for pad, ids in zip(pads, prompts, strict=True)]
    return [pad + ids for pad, ids in zip(pads, prompts, strict=True)], marks


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Call `work`. Returns the seconds that it takes, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result
