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
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.drafters.base import NoDrafter, Target
from soothsay.errors import TrainingError
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.progress import tell_progress
from soothsay.train.examples import Example
from soothsay.train.losses import Likely, likely
from soothsay.train.sequences import Sequences, head_weight

CARD = "features.json"
"""The file of a folder that says which layers were kept."""


class FeatureRecorder(NoDrafter):
    """Drafts nothing, and keeps what the target computes for the tokens of each request.

    Args:
        target: answers, without prefix caching: tokens that are not computed have no features.
        taps: layers whose input is kept, with the normed final states, and the likeliest next tokens.
    """

    def __init__(self, target: Target, taps: Sequence[int]):
        super().__init__(target)
        self.taps = (target.model.spec.num_layers, *taps)
        self._states: dict[Request, list[Tensor]] = {}  # of each pass, [1 + taps, rows, H] bfloat16
        self._teacher: dict[Request, list[Likely]] = {}  # of each token of the answer

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
            if seen.logits is not None:
                self._teacher.setdefault(seen.request, []).append(Likely.of(seen.logits))

    def take(self, request: Request) -> tuple[Tensor, Likely]:
        """What was kept of an ended request.

        Returns:
            The states of its tokens, `[1 + taps, n, H]` bfloat16; the last tokens may lack. And what the
            target expected at each token of the answer.
        """
        return torch.cat(self._states.pop(request), 1), Likely.joined(self._teacher.pop(request))


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

    def write(
        self, name: str, tokens: Sequence[int], num_prompt: int, states: Tensor, teacher: Likely
    ) -> None:
        """Write an answer with its prompt. The file appears when it is complete.

        Args:
            name: of the file, without its suffix.
            tokens: of the prompt and the answer.
            num_prompt: number of the prompt's tokens.
            states: `[1 + taps, n, H]`, of the first n tokens. They are written in 8 bits.
            teacher: what the target expected at each token of the answer.

        Raises `TrainingError` if it cannot be written.
        """
        whole = {
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            **_in_bytes(states.float()),
            "likely": teacher.tokens.int(),
            "probabilities": teacher.probabilities.half(),
        }
        try:
            if not (self.path / CARD).exists():
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / CARD).write_text(json.dumps({"taps": self.taps}) + "\n", "utf-8")
            begun = self.path / f"{name}.part"
            begun.write_bytes(save(whole, {"prompt": str(num_prompt)}))
            os.replace(begun, self.path / f"{name}.safetensors")
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written ({error.strerror})") from None


def _in_bytes(states: Tensor) -> dict[str, Tensor]:
    """States `[P, n, H]` as int8, with a scale for each number of a state, `[P, H]`.

    The first token's are cut where they are larger than all others: real models rest their attention on it.
    """
    scales = states[:, min(1, states.shape[1] - 1) :].abs().amax(1).clamp(min=SMALLEST) / 127
    whole = (states / scales[:, None]).round().clamp(-127, 127)
    return {"states": whole.to(torch.int8), "scales": scales}


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
                said = [opened.get_slice(name).get_shape() for name in ("likely", "probabilities")]
                whole = opened.get_slice("tokens").get_shape()
            if kept != 1 + len(taps) or tokens.ndim != 1 or not length > 0:
                raise ValueError(f"its states do not belong to {len(taps)} layers")
            if said[0] != said[1] or said[0][0] < whole[0] - num_prompt:
                raise ValueError("its probabilities do not belong to its tokens")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"{file} is damaged ({error}); remove it") from None
        if 0 < num_prompt < len(tokens):
            yield Example(tokens, np.arange(len(tokens)) >= num_prompt, file)


def read_computed(example: Example, taps: Sequence[int], config: ModelSpec) -> Computed | None:
    """What a folder keeps of an example; None if it comes from no folder.

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
    answered = int(example.answer.sum())
    with safe_open(example.features, "pt") as opened:
        states = opened.get_tensor("states")[:, : len(example.tokens)]
        scales = opened.get_tensor("scales")
        likely, probabilities = (opened.get_tensor(name)[:answered] for name in ("likely", "probabilities"))
    known = all(
        part.min() >= 0 and part.max() < config.vocab_size for part in (example.tokens, likely) if len(part)
    )
    if scales.shape != (len(states), config.hidden_size) or len(likely) != answered or not known:
        raise TrainingError(f"{example.features} is of another model: its states or tokens do not fit")
    states = states * scales[:, None]
    states = F.pad(states, (0, 0, 0, len(example.tokens) - states.shape[1]))
    return Computed(states, Likely(likely.long(), probabilities.float()))


def _read_card(folder: Path) -> tuple[int, ...]:
    """The layers that a folder has. Raises `TrainingError` if it does not say."""
    try:
        return tuple(int(tap) for tap in json.loads((folder / CARD).read_text("utf-8"))["taps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrainingError(f"{folder} is no folder of features: it has no {CARD} that can be read") from None


@dataclass(frozen=True, slots=True)
class Computed:
    """What a target computed for the rows of an example, or of a batch one after the other."""

    states: Tensor  # [1 + taps, n, H], the normed final states first
    teacher: Likely  # of the tokens of answers, in order


class FeatureStore:
    """What a target computes for examples, kept in memory in bfloat16, or read from a folder of features.

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
        self._kept: dict[int, tuple[Example, Computed]] = {}  # by the example's identity, which is held

    @torch.no_grad()
    def read(self, examples: Sequence[Example], batch: Sequences) -> Computed:
        """Return what the target computes for a batch. It has the examples, padded."""
        if (kept := self._kept_of(examples)) is not None:
            return self._restored(kept, batch)
        states = self._computed(batch)
        teacher = likely(states[0][batch.before_answers], head_weight(self.target))
        if self.left > 0:
            self._keep(examples, batch, states, teacher)
        return Computed(states, teacher)

    @torch.no_grad()
    def states(self, examples: Sequence[Example], batch: Sequences) -> Tensor:
        """The states that `read` returns. The teacher, which takes as long again, is not computed."""
        kept = self._kept_of(examples)
        return self._computed(batch) if kept is None else self._restored(kept, batch).states

    def _computed(self, batch: Sequences) -> Tensor:
        if self.target.spec.source is not None:
            raise TrainingError(
                "drafters of encoder-decoders learn from what the target computed as it answered: give a "
                "folder that `soothsay train data` with --features has written"
            )
        hidden, taps = self.target(batch, taps=self.taps)
        return torch.stack([hidden, *taps])

    def _kept_of(self, examples: Sequence[Example]) -> list[Computed] | None:
        """What memory or disk has of examples; None if it lacks one."""
        known = [self._known(example) for example in examples]
        return cast(list[Computed], known) if all(known) else None

    def _known(self, example: Example) -> Computed | None:
        """What memory or disk has of an example; None if it was not kept."""
        kept = self._kept.get(id(example))
        return read_computed(example, self.taps, self.target.spec) if kept is None else kept[1]

    def _keep(self, examples: Sequence[Example], batch: Sequences, states: Tensor, teacher: Likely) -> None:
        """Keep what fits."""
        whole, end = states.bfloat16().view(len(states), *batch.shape, -1), 0
        for row, example in enumerate(examples):
            begin, end = end, end + int(example.answer[1:].sum())
            own = whole[:, row, : len(example.tokens)]
            said = Likely(teacher.tokens[begin:end].clone(), teacher.probabilities[begin:end].clone())
            size = own.nbytes + said.tokens.nbytes + said.probabilities.nbytes
            if id(example) not in self._kept and size <= self.left:
                self._kept[id(example)] = example, Computed(own.clone(), said)
                self.left -= size

    def _restored(self, kept: Sequence[Computed], batch: Sequences) -> Computed:
        whole = kept[0].states.new_zeros(len(kept[0].states), *batch.shape, kept[0].states.shape[-1])
        for row, one in enumerate(kept):
            whole[:, row, : one.states.shape[1]] = one.states
        device, said = self.target.device, [one.teacher for one in kept]  # some from memory, some from disk
        said = [Likely(own.tokens.to(device), own.probabilities.to(device)) for own in said]
        teacher = Likely.joined(said)
        return Computed(whole.flatten(1, 2).float().to(device), teacher)


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

    The first S of X numbers are scaled.
    """

    scale: Tensor  # [S] factors that bring these numbers to a mean square of 1
    mean: Tensor  # [X] of x
    inputs: Tensor  # [X, X] mean of x x^T
    products: Tensor  # [X, H] mean of x y^T
    weight: Tensor  # [H, X]
    size: float  # root of the mean square of y

    def size_of(self, weight: Tensor) -> float:
        """Root of the mean square of what `weight` `[H, n]` makes of the first n numbers."""
        n = weight.shape[1]
        return float((weight @ self.inputs[:n, :n] * weight).sum(1).mean().sqrt())


Inputs = Callable[[Sequences, Tensor], Tensor]
"""Makes what a head reads of a batch, `[B * T, X]`, from the states of its tokens; see `Computed`."""


def measured(store: FeatureStore, examples: Sequence[Example]) -> Iterator[tuple[Sequences, Tensor]]:
    """The first examples in batches, by length, and the target's states `[1 + taps, B * T, H]` float32."""
    examples = sorted(examples[:MEASURED], key=lambda example: len(example.tokens))
    for first in range(0, len(examples), AT_ONCE):
        some = examples[first : first + AT_ONCE]
        batch = Sequences.of(some, store.target.device)
        yield batch, store.states(some, batch).float()
        tell_progress("measuring the target", first + len(some), len(examples))


def linear_guess(
    store: FeatureStore, examples: Sequence[Example], inputs: Inputs, scaled: int
) -> LinearGuess:
    """Measure the first examples. The first `scaled` of the numbers that `inputs` makes are scaled."""
    mean, xx, xy, yy = (torch.zeros(()) for _ in range(4))
    rows = 0
    for batch, states in measured(store, examples):
        there = F.pad(batch.answer[:, 2:], (0, 2)).flatten()  # before an answer's token
        x, y = inputs(batch, states)[there], states[0].roll(-1, dims=0)[there]
        mean, xx, xy = mean + x.sum(0), xx + x.t() @ x, xy + x.t() @ y
        yy, rows = yy + y.square().mean(1).sum(), rows + len(x)
    xx, xy = xx / rows, xy / rows
    scale = xx.diagonal().clamp(min=SMALLEST).rsqrt()
    scale[scaled:] = 1
    xx, xy = xx * scale * scale[:, None], xy * scale[:, None]
    size, weight = float((yy / rows).sqrt()), least_squares(xx, xy)
    return LinearGuess(scale[:scaled], mean / rows * scale, xx, xy, weight, size)


def least_squares(inputs: Tensor, products: Tensor, ridge: float = RIDGE) -> Tensor:
    """The matrix with small coefficients (ridge) that predicts vectors y from vectors x.

    Args:
        inputs: `[X, X]` mean of x x^T.
        products: `[X, Y]` mean of x y^T.
        ridge: weight of the size of the coefficients, relative to the inputs' mean square.

    Returns:
        `[Y, X]`.
    """
    small = ridge * inputs.diagonal().mean() * torch.eye(len(inputs), device=inputs.device)
    return torch.cholesky_solve(products, torch.linalg.cholesky(inputs + small)).t()
