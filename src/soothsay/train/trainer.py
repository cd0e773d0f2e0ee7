"""The training loop: steps, the learning rate's schedule, and checkpoints that resume to the same bits."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from soothsay.core.transfer import download
from soothsay.errors import TrainingError
from soothsay.files import locked, replacing
from soothsay.model.weights.writing import require_free
from soothsay.plotting import new_figure, save_png, tidy
from soothsay.train.examples import Example, batches
from soothsay.train.sequences import compile_blocks
from soothsay.train.training_config import TrainingConfig

STATE = "state.safetensors"

OUTER = frozenset({"embedding", "head", "lm_heads"})
"""Names of matrices with a row for each token of the vocabulary. Muon is made for the other matrices."""


WEIGHT_DECAY = 0.01
"""The share of matrices within layers that a step at a rate of 1 takes away."""

CLIP = 1.0
"""Largest norm of all gradients together. Larger gradients are scaled down."""


def resumes(directory: Path) -> bool:
    """Whether a directory has the state of a training, with the weights to go on with."""
    return (directory / "training" / STATE).is_file()


class Recipe(Protocol):
    """Says what is trained, and what its loss is."""

    name: str
    trained: nn.Module
    """The only module whose parameters change."""

    def modules(self) -> Sequence[nn.Module]:
        """Return all modules that a step runs, frozen ones included."""

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        """Compute the losses of a batch, as scalars. `loss` is minimized, the others are reported."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint that can be served to `directory`, which does not exist yet."""

    def evaluate(self, directory: Path) -> dict[str, float]:
        """Measure the checkpoint that was saved to `directory`. The best one has the highest `score`."""

    def identity(self) -> Mapping[str, Any]:
        """Return what must be equal in a saved state to resume from it."""


StepReport = Callable[[int, Mapping[str, float]], None]
"""Called after each step with the number of finished steps, and the values by name."""


class Trainer:
    """Trains `recipe` on `examples`, and resumes from the state in `directory` if there is one.

    `directory/training` has two files. `state.safetensors` holds the weights, the optimizers' state and, as
    metadata, the number of steps; it is replaced atomically. `metrics.jsonl` has a line for each step. The
    checkpoint with the best score is in `directory` itself.

    Raises `TrainingError` if the directory has the state of another training, and `ModelError` if it has
    files and no training: they may be the model itself.
    """

    def __init__(self, recipe: Recipe, examples: Sequence[Example], config: TrainingConfig, directory: Path):
        self.recipe, self.examples, self.config, self.directory = recipe, examples, config, directory
        self.step = self.saved = 0
        self.best: float | None = None
        self.device = next(recipe.trained.parameters()).device
        self.optimizers = _optimizers(recipe.trained, config)
        if config.compiled:
            for module in recipe.modules():
                compile_blocks(module)
        self._state = directory / "training"
        self.metrics = self._state / "metrics.jsonl"
        if not self._state.is_dir():
            require_free(directory)
        self._state.mkdir(parents=True, exist_ok=True)
        if resumes(directory):
            self._resume()

    def run(self, report: StepReport, stop_after: int | None = None) -> None:
        """Train to the end, or for `stop_after` steps. An interrupt loses the steps after the last save.

        Raises `TrainingError` if another process trains in the same directory.
        """
        try:
            with locked(self._state / "lock"):
                self._train(report, stop_after)
        except BlockingIOError:
            raise TrainingError(f"another process trains in {self.directory}; name another one") from None

    def _train(self, report: StepReport, stop_after: int | None) -> None:
        config = self.config
        stream = batches(self.examples, config.batch_tokens // config.parts, config.seed)
        parts = islice(stream, self.step * config.parts, None)
        last = config.steps if stop_after is None else min(config.steps, self.step + stop_after)
        while self.step < last:
            begin = time.monotonic()
            measured = self._step(parts)
            self.step += 1
            measured["tokens_per_second"] = measured.pop("tokens") / (time.monotonic() - begin)
            if self.step % config.evaluate_every == 0 or self.step == config.steps:
                measured |= self._evaluate()
            with open(self.metrics, "a") as file:
                file.write(json.dumps({"step": self.step, **measured}) + "\n")
            if self.step % config.save_every == 0 or self.step == last:
                self.save()
            report(self.step, measured)

    def _step(self, parts: Iterator[list[Example]]) -> dict[str, float]:
        """Update the weights once. Raises `TrainingError` if the loss is not finite."""
        config, device = self.config, self.device
        self.recipe.trained.train()
        sums: dict[str, Tensor] = {}
        tokens = 0
        for part in range(config.parts):
            examples = next(parts)
            tokens += sum(len(example.tokens) for example in examples)
            generator = torch.Generator(device).manual_seed(
                config.seed * 1_000_003 + self.step * config.parts + part
            )
            with torch.autocast(device.type, torch.bfloat16):
                losses = self.recipe.losses(examples, generator)
            (losses["loss"] / config.parts).backward()  # type: ignore[no-untyped-call]
            for name, value in losses.items():
                own = value.detach().double() / config.parts
                sums[name] = sums[name] + own if name in sums else own
        sums["gradient_norm"] = nn.utils.clip_grad_norm_(self.recipe.trained.parameters(), CLIP)
        found = download(*sums.values())  # behind the step's one wait
        measured = {name: float(value) for name, value in zip(sums, found, strict=True)}
        if not math.isfinite(measured["loss"]):
            raise TrainingError(
                f"the loss is {measured['loss']} in step {self.step + 1}: lower the learning rate and go on "
                f"from the last checkpoint, which is in {self.directory}"
            )
        rate = config.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_rate"] * rate
            optimizer.step()
            optimizer.zero_grad()
        return {**measured, "rate": rate, "tokens": tokens}

    def _evaluate(self) -> dict[str, float]:
        """Measure the current weights, and keep their checkpoint if it is the best."""
        self.recipe.trained.eval()
        with TemporaryDirectory(prefix=".evaluating-", dir=self.directory) as temporary, torch.no_grad():
            saved = Path(temporary, self.directory.name)
            try:
                self.recipe.save(saved)
            except (OSError, SafetensorError) as error:
                raise TrainingError(f"{self.directory} could not be written: {error}") from error
            measured = self.recipe.evaluate(saved)
            if self.best is None or measured["score"] > self.best:
                self.best = measured["score"]
                for file in [path for path in saved.rglob("*") if path.is_file()]:
                    place = self.directory / file.relative_to(saved)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, place)
        return measured

    def save(self) -> None:
        """Write the state to resume from. It replaces the last one atomically."""
        tensors = {f"weights.{name}": t for name, t in self.recipe.trained.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{i}.{index}.{key}": value for key, value in state.items()}
        content = {
            "recipe": dict(self.recipe.identity()),
            "config": asdict(self.config),
            "step": self.step,
            "best": self.best,
        }
        tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
        metadata = {"training": json.dumps(content)}
        _replace(self._state / STATE, lambda file: save_file(_unshared(tensors), file, metadata=metadata))
        self.saved = self.step

    def _resume(self) -> None:
        """Restore the state that `save` has written. Raises `TrainingError` if it is damaged."""
        try:
            with safe_open(self._state / STATE, framework="pt") as tensors:
                content = json.loads(tensors.metadata()["training"])
                self._check_recipe(content["recipe"])
                self._load({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise TrainingError(
                f"{self._state / STATE} is damaged ({error}): name another directory, or remove this one"
            ) from error
        self.step = self.saved = content["step"]
        self.best = content["best"]
        if self.metrics.is_file():  # steps after the last save will be repeated
            lines = self.metrics.read_text().splitlines()[: self.step]
            _replace(self.metrics, lambda file: file.write_text("".join(f"{line}\n" for line in lines)))

    def _check_recipe(self, was: Mapping[str, Any]) -> None:
        """Raise `TrainingError` if a saved state is of another recipe."""
        own = json.loads(json.dumps(dict(self.recipe.identity())))
        for key in {**was, **own}:
            if was.get(key) != own.get(key):
                raise TrainingError(
                    f"{self.directory} holds a training with {key} {was.get(key)!r}, not "
                    f"{own.get(key)!r}: name another directory, or remove this one"
                )

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set weights and optimizers from saved tensors, such as `weights.NAME` and `optimizer.0.3.KEY`."""
        weights: dict[str, Tensor] = {}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "weights":
                weights[rest] = tensor
            else:
                optimizer, index, key = rest.split(".")
                states[int(optimizer)].setdefault(int(index), {})[key] = tensor
        self.recipe.trained.load_state_dict(weights, strict=False)
        for own, state in zip(self.optimizers, states, strict=True):
            own.load_state_dict({**own.state_dict(), "state": state})


def _optimizers(trained: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Make the optimizers: Muon for matrices within layers, AdamW for all other parameters."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            inner = parameter.ndim == 2 and OUTER.isdisjoint(name.split("."))
            (matrices if inner else others).append(parameter)
    c, made = config, list[torch.optim.Optimizer]()
    if matrices:
        muon = torch.optim.Muon(
            matrices, lr=c.matrix_learning_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        made.append(muon)
    if others:
        adam = torch.optim.AdamW(
            others, lr=c.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
        )
        made.append(adam)
    for optimizer in made:
        for group in optimizer.param_groups:
            group["base_rate"] = group["lr"]
    return made


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep one of the tensors that share memory, such as a tied head and its embedding."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen or tensor.numel() < 2:
            seen.add(tensor.data_ptr())
            out[name] = tensor
    return out


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Replace `file` by what `write` writes to the path that it is given. Raises `TrainingError`."""
    try:
        with replacing(file) as temporary:
            write(temporary)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{file} could not be written ({error}); the state before it is kept") from error


def plot_metrics(metrics: Path, path: Path) -> None:
    """Draw the loss by step and the results of evaluations to a PNG file.

    The loss is smoothed over a fiftieth of the steps.

    Args:
        metrics: JSON lines that `Trainer` has written.
        path: of the chart.

    Raises `SoothsayError` if matplotlib is not installed.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    evaluated = [line for line in lines if "score" in line]
    names = [
        name for name in ("accepted", "accepted_sampled", "held_out_lm") if evaluated and name in evaluated[0]
    ]
    figure = new_figure(figsize=(10 if names else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    panels[0].plot(steps, losses, color="C0", alpha=0.25)
    panels[0].plot(steps, _smooth(losses, max(1, len(losses) // 50)), color="C0")
    panels[0].set_ylabel("loss, nats a token")
    for name in names:
        found = [line[name] for line in evaluated]
        panels[1].plot([line["step"] for line in evaluated], found, "o-", label=name.replace("_", " "))
    if names:
        panels[1].set_ylabel("held-out loss" if names == ["held_out_lm"] else "tokens a step")
        panels[1].legend(frameon=False)
    for panel in panels:
        panel.set_xlabel("steps")
        tidy(panel)
    save_png(figure, path, dpi=120)


def _smooth(values: list[float], width: int) -> list[float]:
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - width + 1) : i + 1])
    ]
