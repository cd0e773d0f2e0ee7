"""What a frozen target computes for examples: kept in memory for later epochs, or on disk while it answers.

A folder of features has a file for each answer, with the tokens of its conversation and the states of the
target at them, as the engine computed them in the target's own numeric mode. Training on them needs no
further pass. `linear_guess` measures how well features predict what comes next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.drafters.base import NoDrafter, Target
from soothsay.errors import TrainingError
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.sequences import Sequences

CARD = "features.json"
"""The file of a folder that says which layers were kept."""


class FeatureRecorder(NoDrafter):
    """Drafts nothing, and keeps what the target computes for the tokens of each request.

    Args:
        target: answers, without prefix caching: tokens that are not computed have no features.
        taps: layers whose input is kept, with the normed final states.
    """

    def __init__(self, target: Target, taps: Sequence[int]):
        super().__init__(target)
        self.taps = (target.model.spec.num_layers, *taps)
        self._states: dict[Request, list[Tensor]] = {}  # of each pass, [1 + taps, rows, H] bfloat16

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the states of the rows. A request that was preempted begins anew."""
        model = self.target.model
        for seen in observations:
            last, *taps = seen.taps
            final = model.kernels.norm(last.contiguous(), model.norm, torch.float32)
            passes = self._states.setdefault(seen.request, [])
            if seen.start == 0:
                passes.clear()
            passes.append(torch.stack([final, *taps]).bfloat16())

    def take(self, request: Request) -> Tensor:
        """The states of an ended request's tokens, `[1 + taps, n, H]` bfloat16. The last tokens may lack."""
        return torch.cat(self._states.pop(request), 1)


class FeatureFolder:
    """A folder of features.

    Args:
        path: of the folder. It is made at the first answer.
        taps: layers whose input is kept.

    Raises `TrainingError` if the folder has features of other layers.
    """

    def __init__(self, path: Path, taps: Sequence[int]):
        self.path, self.taps = path, tuple(taps)
        if path.exists() and (kept := _read_card(path)) != self.taps:
            raise TrainingError(
                f"{path} has features of layers {kept}, not of {self.taps}; name another file"
            )

    def write(self, name: str, tokens: Sequence[int], num_prompt: int, states: Tensor) -> None:
        """Write an answer with its prompt. The file appears when it is complete.

        Args:
            name: of the file, without its suffix.
            tokens: of the prompt and the answer.
            num_prompt: number of the prompt's tokens.
            states: `[1 + taps, n, H]`, of the first n tokens.

        Raises `TrainingError` if it cannot be written.
        """
        whole = {"tokens": torch.tensor(tokens, dtype=torch.int32), "states": states.contiguous()}
        try:
            if not (self.path / CARD).exists():
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / CARD).write_text(json.dumps({"taps": self.taps}) + "\n", "utf-8")
            begun = self.path / f"{name}.part"
            begun.write_bytes(save(whole, {"prompt": str(num_prompt)}))
            os.replace(begun, self.path / f"{name}.safetensors")
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written ({error.strerror})") from None


def is_feature_folder(path: Path) -> bool:
    """Whether a path is a folder of features."""
    return (path / CARD).is_file()


def recorded_examples(path: Path, max_tokens: int) -> Iterator[Example]:
    """The answers in a folder of features, in order of their names, each cut to `max_tokens`.

    Raises `TrainingError` if a file is damaged.
    """
    taps = _read_card(path)
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                tokens = opened.get_tensor("tokens").numpy().astype(np.int64)[:max_tokens]
                num_prompt = int(opened.metadata()["prompt"])
                kept, length, _ = opened.get_slice("states").get_shape()
            if kept != 1 + len(taps) or tokens.ndim != 1 or not length > 0:
                raise ValueError(f"its states do not belong to {len(taps)} layers")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"{file} is damaged ({error}); remove it") from None
        if 0 < num_prompt < len(tokens):
            yield Example(tokens, np.arange(len(tokens)) >= num_prompt, file)


def read_states(example: Example, taps: Sequence[int], config: ModelSpec) -> Tensor | None:
    """The states `[1 + taps, n, H]` bfloat16 of an example's n tokens; None if they were not kept.

    Tokens at the end whose states nobody computed have zeros. Raises `TrainingError` if other layers were
    kept, or those of a model of another size or vocabulary.
    """
    if example.features is None:
        return None
    folder = example.features.parent
    if (kept := _read_card(folder)) != tuple(taps):
        raise TrainingError(
            f"{folder} has features of layers {kept}, and this drafter reads {tuple(taps)}: run "
            "`soothsay train data` with --features of this drafter"
        )
    with safe_open(example.features, "pt") as opened:
        states: Tensor = opened.get_tensor("states")[:, : len(example.tokens)]
    known = example.tokens.min() >= 0 and example.tokens.max() < config.vocab_size
    if states.shape[-1] != config.hidden_size or not known:
        raise TrainingError(f"{example.features} is of another model: its states or tokens do not fit")
    return torch.nn.functional.pad(states, (0, 0, 0, len(example.tokens) - states.shape[1]))


def _read_card(folder: Path) -> tuple[int, ...]:
    """The layers that a folder has. Raises `TrainingError` if it does not say."""
    try:
        return tuple(int(tap) for tap in json.loads((folder / CARD).read_text("utf-8"))["taps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrainingError(f"{folder} is no folder of features: it has no {CARD} that can be read") from None


class FeatureStore:
    """The final states and taps of examples, in memory, in bfloat16, or from a folder of features.

    The target reads an example once instead of in each epoch: it takes most of the time of a step. When the
    memory is full, further examples are computed each time. What is kept was computed beside other examples,
    so a run that was interrupted goes on with slightly other numbers than one that was not.

    Args:
        target: the model.
        taps: layers whose input is kept, with the final states.
        size: bytes that may be kept; 0: nothing is.
    """

    def __init__(self, target: Transformer, taps: Sequence[int], size: int = 0):
        self.target, self.taps, self.left = target, taps, size
        self._kept: dict[int, tuple[Example, Tensor]] = {}  # by the example's identity, which is held

    @torch.no_grad()
    def read(self, examples: Sequence[Example], batch: Sequences) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's final states `[B * T, H]`, and its taps. `batch` has the examples, padded."""
        known = [self._known(example) for example in examples]
        if all(states is not None for states in known):
            return self._restored(cast(list[Tensor], known), batch)
        hidden, taps = self.target(batch, taps=self.taps)
        if self.left > 0:
            whole = torch.stack([hidden, *taps]).bfloat16().view(1 + len(taps), *batch.shape, -1)
            for row, example in enumerate(examples):
                states = whole[:, row, : len(example.tokens)]
                if id(example) not in self._kept and states.nbytes <= self.left:
                    self._kept[id(example)] = example, states.clone()
                    self.left -= states.nbytes
        return hidden, taps

    def _known(self, example: Example) -> Tensor | None:
        """The states of an example in memory or on disk, `[1 + taps, n, H]` bfloat16; None if not kept."""
        kept = self._kept.get(id(example))
        return read_states(example, self.taps, self.target.spec) if kept is None else kept[1]

    def _restored(self, kept: Sequence[Tensor], batch: Sequences) -> tuple[Tensor, tuple[Tensor, ...]]:
        whole = kept[0].new_zeros(len(kept[0]), *batch.shape, kept[0].shape[-1])
        for row, states in enumerate(kept):
            whole[:, row, : states.shape[1]] = states
        hidden, *taps = whole.float().flatten(1, 2)
        return hidden, tuple(taps)


MEASURED = 1024
"""Examples in which the sizes of features and their linear relations are measured."""

AT_ONCE = 16
"""Examples whose states are read together."""

SMALLEST = 1e-5
"""Least mean square of a number: what is always 0 stays it."""

RIDGE = 0.003
"""Weight of the size of the coefficients in least squares, relative to the inputs' mean square."""


@dataclass(frozen=True, eq=False)
class LinearGuess:
    """The best linear prediction of the target's next final state y from numbers x that a head reads.

    The first S of X numbers are of taps. They are scaled.
    """

    scale: Tensor  # [S] factors that bring the numbers of taps to a mean square of 1
    mean: Tensor  # [X] of x
    inputs: Tensor  # [X, X] mean of x x^T
    weight: Tensor  # [H, X]
    size: float  # root of the mean square of y

    def size_of(self, weight: Tensor) -> float:
        """Root of the mean square of what `weight` `[H, n]` makes of the first n numbers."""
        n = weight.shape[1]
        return float((weight @ self.inputs[:n, :n] * weight).sum(1).mean().sqrt())


Inputs = Callable[[Sequences, Sequence[Tensor]], Tensor]
"""Makes what a head reads of a batch, `[B * T, X]`, from the taps of its tokens."""


def linear_guess(store: FeatureStore, examples: Sequence[Example], inputs: Inputs) -> LinearGuess:
    """Measure the first examples. What `inputs` makes begins with the taps."""
    mean, xx, xy, yy = (torch.zeros(()) for _ in range(4))
    rows = 0
    for first in range(0, min(len(examples), MEASURED), AT_ONCE):
        some = examples[first : first + AT_ONCE]
        batch = Sequences.of(some, store.target.device)
        hidden, taps = store.read(some, batch)
        there = batch.real.view(-1).roll(-1) & (batch.positions < batch.shape[1] - 1)
        x, y = inputs(batch, taps)[there], hidden.roll(-1, dims=0)[there]
        mean, xx, xy = mean + x.sum(0), xx + x.t() @ x, xy + x.t() @ y
        yy, rows = yy + y.square().mean(1).sum(), rows + len(x)
    xx, xy = xx / rows, xy / rows
    of_taps = len(store.taps) * store.target.spec.hidden_size
    scale = xx.diagonal().clamp(min=SMALLEST).rsqrt()
    scale[of_taps:] = 1
    xx = xx * scale * scale[:, None]
    weight = least_squares(xx, xy * scale[:, None])
    return LinearGuess(scale[:of_taps], mean / rows * scale, xx, weight, float((yy / rows).sqrt()))


def least_squares(inputs: Tensor, products: Tensor) -> Tensor:
    """The matrix with small coefficients (ridge) that predicts vectors y from vectors x.

    Args:
        inputs: `[X, X]` mean of x x^T.
        products: `[X, Y]` mean of x y^T.

    Returns:
        `[Y, X]`.
    """
    ridge = RIDGE * inputs.diagonal().mean() * torch.eye(len(inputs), device=inputs.device)
    return torch.cholesky_solve(products, torch.linalg.cholesky(inputs + ridge)).t()
