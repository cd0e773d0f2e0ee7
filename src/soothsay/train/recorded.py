"""The target's features, kept on disk while it answers: training on them needs no further pass of the target.

A folder has a file for each answer, with the tokens of its conversation and the states of the target at them,
as the engine computed them in the target's own numeric mode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.drafters.base import NoDrafter, Target
from soothsay.errors import TrainingError
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.train.examples import Example

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
        self.taps = (target.model.config.num_layers, *taps)
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
