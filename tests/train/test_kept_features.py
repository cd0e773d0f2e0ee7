"""What the target computes for examples is kept, and is the same later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.features import FeatureStore
from soothsay.train.losses import likely
from soothsay.train.sequences import Sequences, TrainingKernels


def example(length: int) -> Example:
    return Example(np.random.default_rng(length).integers(0, 97, length), np.ones(length, dtype=bool))


def test_later_epochs_read_what_was_kept(tiny: Callable[..., Transformer]) -> None:
    model = Transformer(tiny(0).spec, TrainingKernels())
    calls: list[int] = []
    model.register_forward_hook(lambda _, inputs, out: calls.append(inputs[0].num_slots))
    long, short, third = example(9), example(5), example(7)
    said = (8 + 4) * 64  # of a token of an answer; the first token is not predicted
    store = FeatureStore(model, (0, 2), size=3 * 48 * 2 * (9 + 5) + said * (8 + 4))
    for examples in ([long, short], [third]):
        store.read(examples, Sequences.of(examples))
    assert (store.left, calls) == (0, [18, 7])

    batch = Sequences.of([short, long])
    kept = store.read([short, long], batch)
    assert calls == [18, 7]
    expected, layers = model(batch, taps=(0, 2))
    there = batch.real.flatten()
    for own, fresh in zip(kept.states, (expected, *layers), strict=True):
        torch.testing.assert_close(own[there], fresh[there], atol=0.02, rtol=0.02)
        assert not own[~there].any()
    fresh_teacher = likely(expected[batch.before_answers], model.head.weight)
    torch.testing.assert_close(kept.teacher.probabilities, fresh_teacher.probabilities, atol=1e-5, rtol=1e-4)

    store.read([short, third], Sequences.of([short, third]))  # there was no room for the third
    assert calls[-1] == 14


def test_nothing_is_kept_unless_it_is_asked_for(tiny: Callable[..., Transformer]) -> None:
    model, one = Transformer(tiny(0).spec, TrainingKernels()), example(6)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    store = FeatureStore(model, (0,))
    for _ in range(2):
        store.read([one], Sequences.of([one]))
    assert len(calls) == 2
