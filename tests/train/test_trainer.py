from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from soothsay.errors import ModelError, TrainingError
from soothsay.train import training_config
from soothsay.train.examples import Example
from soothsay.train.trainer import Trainer
from soothsay.train.training_config import TrainingConfig

EXAMPLES = [Example(np.arange(i, i + 8) % 16, np.ones(8, dtype=np.bool_)) for i in range(40)]
CONFIG = TrainingConfig(steps=6, batch_tokens=32, parts=2, evaluate_every=2, save_every=2)


class Toy:
    """Predicts the next of sixteen tokens from the last, with a matrix and a bias, and some noise."""

    name = "toy"

    def __init__(self, size: int = 16) -> None:
        torch.manual_seed(0)
        self.trained = nn.ModuleDict({"embedding": nn.Embedding(16, size), "layer": nn.Linear(size, 16)})
        self.saved = 0

    def modules(self) -> Sequence[nn.Module]:
        return [self.trained]

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.stack([torch.from_numpy(example.tokens) for example in examples])
        embedded = self.trained["embedding"](tokens[:, :-1])
        noise = torch.randn(embedded.shape, generator=generator)
        logits = self.trained["layer"](embedded + 0.1 * noise).float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}

    def save(self, directory: Path) -> None:
        self.saved += 1
        (directory / "inner").mkdir(parents=True)
        (directory / "inner" / "number").write_text(str(self.saved))

    def evaluate(self, directory: Path) -> dict[str, float]:
        assert (directory / "inner" / "number").read_text() == str(self.saved)
        return {"score": [1.0, 3.0, 2.0][self.saved - 1]}

    def identity(self) -> Mapping[str, Any]:
        return {"recipe": self.name, "size": self.trained["embedding"].weight.shape[1]}


class Log(dict[int, Mapping[str, float]]):
    def __call__(self, step: int, measured: Mapping[str, float]) -> None:
        self[step] = measured


def state(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "training" / "state.safetensors")


def same_state(a: Path, b: Path) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def lines(directory: Path) -> list[dict[str, float]]:
    """The metrics without the speed."""
    text = (directory / "training" / "metrics.jsonl").read_text()
    made = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in made]


def test_learns_and_keeps_the_best(tmp_path: Path) -> None:
    log = Log()
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path / "out").run(log)
    assert list(log) == [1, 2, 3, 4, 5, 6]
    assert log[6]["loss"] < log[1]["loss"]
    assert (tmp_path / "out" / "inner" / "number").read_text() == "2"  # scored 3.0
    assert [line["step"] for line in lines(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "out").glob(".evaluating-*"))


@pytest.mark.parametrize("stop", [2, 4])
def test_goes_on_to_the_same_bits(tmp_path: Path, stop: int) -> None:
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path / "whole").run(Log())
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path / "parts").run(Log(), stop_after=stop)
    again, log = Toy(), Log()
    again.saved = stop // 2
    Trainer(again, EXAMPLES, CONFIG, tmp_path / "parts").run(log)
    assert min(log) == stop + 1
    same_state(tmp_path / "whole", tmp_path / "parts")
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


@pytest.mark.parametrize("stop", [2, 4])
def test_the_best_checkpoint_is_kept_when_a_training_goes_on(tmp_path: Path, stop: int) -> None:
    """The scores are 1, 3 and 2: the last one is no reason to replace the second."""
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log(), stop_after=stop)
    again = Toy()
    again.saved = stop // 2
    trainer = Trainer(again, EXAMPLES, CONFIG, tmp_path)
    assert trainer.best == [1.0, 3.0][stop // 2 - 1]
    trainer.run(Log())
    assert (tmp_path / "inner" / "number").read_text() == "2"
    assert trainer.best == 3.0


def test_an_interrupt_loses_the_steps_since_the_last_checkpoint_and_no_more(tmp_path: Path) -> None:
    def interrupt(step: int, measured: Mapping[str, float]) -> None:
        if step == 5:
            raise KeyboardInterrupt

    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path / "whole").run(Log())
    with pytest.raises(KeyboardInterrupt):
        Trainer(Toy(), EXAMPLES, CONFIG, tmp_path / "parts").run(interrupt)
    again, log = Toy(), Log()
    again.saved = 2
    Trainer(again, EXAMPLES, CONFIG, tmp_path / "parts").run(log)
    assert min(log) == 5
    same_state(tmp_path / "whole", tmp_path / "parts")
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_two_trainings_in_one_directory_are_refused(tmp_path: Path) -> None:
    def train_too(step: int, measured: Mapping[str, float]) -> None:
        with pytest.raises(TrainingError, match="another process trains in"):
            Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log())

    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(train_too, stop_after=1)
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log())
    assert len(lines(tmp_path)) == 6


def test_the_noise_is_the_steps_own(tmp_path: Path) -> None:
    """The noise differs between steps. The tests above would pass with the same noise in all steps."""
    seen = []

    class Noted(Toy):
        def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
            seen.append(float(torch.rand(1, generator=generator)))
            return super().losses(examples, generator)

    Trainer(Noted(), EXAMPLES, CONFIG, tmp_path).run(Log())
    assert len(set(seen)) == CONFIG.steps * CONFIG.parts


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log(), stop_after=2)
    with pytest.raises(TrainingError, match="holds a training with size 16, not 8"):
        Trainer(Toy(size=8), EXAMPLES, CONFIG, tmp_path)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """It may be the model itself, whose config.json the first checkpoint would replace."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="exists and is not an empty directory; name another one"):
        Trainer(Toy(), EXAMPLES, CONFIG, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log(), stop_after=2)
    os.truncate(tmp_path / "training" / "state.safetensors", 100)
    with pytest.raises(TrainingError, match=r"state\.safetensors is damaged .* name another directory"):
        Trainer(Toy(), EXAMPLES, CONFIG, tmp_path)


def test_a_state_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Toy(), EXAMPLES, CONFIG, tmp_path)
    trainer.run(Log(), stop_after=2)
    before = state(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("soothsay.train.trainer.save_file", full)
    with pytest.raises(TrainingError, match=r"No space left on device.*the state before it is kept"):
        trainer.run(Log())
    assert all(torch.equal(before[name], tensor) for name, tensor in state(tmp_path).items())
    assert not list((tmp_path / "training").glob(".*"))


def test_a_loss_that_is_no_number_ends_it_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    class Broken(Toy):
        def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
            return {"loss": super().losses(examples, generator)["loss"] * float("nan")}

    Trainer(Toy(), EXAMPLES, CONFIG, tmp_path).run(Log(), stop_after=2)
    before = state(tmp_path)
    with pytest.raises(TrainingError, match=r"the loss is nan in step 3: lower the learning rate"):
        Trainer(Broken(), EXAMPLES, CONFIG, tmp_path).run(Log())
    assert all(torch.equal(before[name], tensor) for name, tensor in state(tmp_path).items())


def test_the_learning_rate_rises_stays_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_config, "WARMUP", 0.1)
    config = TrainingConfig(steps=100, decay=0.5)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:51] == [1.0] * 42
    assert rates[75] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)
