"""Features that are kept while the target answers are its states, and training runs no pass for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soothsay import LLM, SamplingParams
from soothsay.errors import TrainingError
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.answers import NumberedMessages, write_answers
from soothsay.train.examples import Example
from soothsay.train.features import (
    FeatureFolder,
    FeatureStore,
    is_feature_folder,
    read_computed,
    recorded_examples,
)
from soothsay.train.losses import Likely, likely
from soothsay.train.new_heads import taps_of
from soothsay.train.sequences import Sequences, TrainingKernels, weight_of

ASKED = [
    NumberedMessages(number, ({"role": "user", "content": text}, *more))
    for number, (text, *more) in enumerate(
        [
            ("Tell me a story about a river and a mountain.", {"role": "user", "content": "And then?"}),
            ("What is the sky?",),
            ("Hello!",),
        ]
    )
]
TAPS = taps_of("redrafter", 8)


@pytest.fixture(scope="module")
def trainable() -> Transformer:
    return load_model(open_checkpoint("sibyl"), "float32", "cpu", TrainingKernels())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Features of four answers. Two run at a time, in a cache so small that one is preempted."""
    path = tmp_path / "answers.features"
    llm = LLM("sibyl", dtype="float32", drafter="none", max_requests=2, kv_tokens=96, prefix_caching=False)
    params = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
    write_answers(llm, ASKED, tmp_path / "answers.jsonl", params, features=FeatureFolder(path, TAPS))
    return path


def test_features_are_the_targets_states(folder: Path, trainable: Transformer) -> None:
    assert is_feature_folder(folder)
    assert not is_feature_folder(folder.parent)
    examples = list(recorded_examples(folder, 1000))
    assert len(examples) == 4
    assert [int(example.answer.sum()) for example in examples] == [24] * 4
    calls: list[int] = []
    handle = trainable.register_forward_hook(lambda *_: calls.append(1))
    batch = Sequences.of(examples)
    computed = FeatureStore(trainable, TAPS).read(examples, batch)
    assert not calls
    handle.remove()
    expected, layers = trainable(batch, taps=TAPS)
    known = batch.real.clone()
    for row, example in enumerate(examples):
        known[row, len(example.tokens) - 1] = False  # the last token was chosen, and not read
    known &= batch.positions.view(batch.shape) > 0
    for kept, fresh in zip(computed.states, (expected, *layers), strict=True):
        rows = known.flatten()
        steps = fresh[rows].abs().amax(0) / 127
        assert ((kept[rows] - fresh[rows]).abs() <= steps + 0.004 * fresh[rows].abs()).all()
    said = likely(expected[batch.before_answers], weight_of(trainable.head))
    assert (computed.teacher.tokens[:, 0] == said.tokens[:, 0]).float().mean() > 0.98
    torch.testing.assert_close(computed.teacher.probabilities, said.probabilities, atol=1e-3, rtol=1e-2)


def test_a_cut_example_has_the_states_of_its_tokens(folder: Path, trainable: Transformer) -> None:
    whole, cut = (list(recorded_examples(folder, size)) for size in (1000, 20))
    pairs = [(a, b) for a in whole for b in cut if a.features == b.features]
    assert pairs
    for a, b in pairs:
        long, short = (FeatureStore(trainable, TAPS).read([one], Sequences.of([one])) for one in (a, b))
        assert short.states.shape[1] == 20
        assert torch.equal(short.states, long.states[:, :20])
        assert len(short.teacher.tokens) == int(b.answer.sum())
        assert torch.equal(short.teacher.tokens, long.teacher.tokens[: len(short.teacher.tokens)])


def test_features_of_other_layers_are_refused(folder: Path, trainable: Transformer) -> None:
    with pytest.raises(TrainingError, match=r"has features of layers .* not of \(1, 2\)"):
        FeatureFolder(folder, (1, 2))
    (first, *_) = recorded_examples(folder, 1000)
    with pytest.raises(TrainingError, match="--features of this drafter"):
        FeatureStore(trainable, (1, 2)).read([first], Sequences.of([first]))


@pytest.mark.parametrize(
    "damage", ["cut", "no tokens", "no prompt", "no states", "no likely", "fewer layers", "fewer answers"]
)
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        tensors = load_file(file)
        kept = {name: value for name, value in tensors.items() if damage != f"no {name}"}
        if damage == "fewer layers":
            kept["states"] = kept["states"][1:].clone()
        if damage == "fewer answers":
            kept["likely"] = kept["likely"][1:].clone()
        save_file(kept, file, None if damage == "no prompt" else {"prompt": "5"})
    with pytest.raises(TrainingError, match=rf"{file.name} is damaged"):
        list(recorded_examples(folder, 1000))


@pytest.mark.parametrize("change", ["vocab_size", "hidden_size"])
def test_features_of_another_model_are_refused(folder: Path, trainable: Transformer, change: str) -> None:
    (first, *_) = recorded_examples(folder, 1000)
    smaller = replace(trainable.spec, **{change: 16})
    with pytest.raises(TrainingError, match="is of another model"):
        read_computed(first, TAPS, smaller)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be written"):
        FeatureFolder(tmp_path / "file" / "folder", TAPS).write(
            *("0", [1, 2], 1, torch.zeros(4, 1, 8)), Likely.of(torch.zeros(1, 9))
        )


def test_without_features_nothing_is_read(trainable: Transformer, folder: Path) -> None:
    (first, *_) = recorded_examples(folder, 1000)
    same = Example(first.tokens, first.answer)
    calls: list[int] = []
    handle = trainable.register_forward_hook(lambda *_: calls.append(1))
    FeatureStore(trainable, TAPS).read([same], Sequences.of([same]))
    handle.remove()
    assert calls
