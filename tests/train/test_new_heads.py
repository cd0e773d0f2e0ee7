"""A new head begins with what needs no training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from soothsay.drafters.heads.block import BlockHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.model.transformer import Transformer
from soothsay.train import new_heads
from soothsay.train.examples import Example
from soothsay.train.features import RIDGE
from soothsay.train.sequences import Sequences, TrainingKernels


def test_a_redrafter_begins_with_the_best_linear_guess(tiny: Callable[..., Transformer]) -> None:
    """The weights equal those of NumPy's least squares, with a row for each input that keeps them small."""
    torch.manual_seed(0)
    target = Transformer(tiny(0).spec, TrainingKernels())
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(0, 97, n), np.ones(n, dtype=bool)) for n in rng.integers(5, 30, 40).tolist()
    ]
    head = new_heads.redrafter(target, examples, 2, 16, 16)
    inputs, outputs = [], []
    for example in examples:
        with torch.no_grad():
            hidden, taps = target(Sequences.of([example]), taps=head.taps)
            embedded = head.embedded(torch.from_numpy(example.tokens), TargetEnds.of(target))
        inputs.append(torch.cat([torch.cat(taps, -1)[:-2] * head.tap_scale, embedded[1:-1]], -1))
        outputs.append(hidden[1:-1])
    x, y = torch.cat(inputs).double().numpy(), torch.cat(outputs).double().numpy()
    np.testing.assert_allclose((x[:, : len(head.tap_scale)] ** 2).mean(0), 1, rtol=1e-3)
    small = np.sqrt(RIDGE * (x**2).mean() * len(x)) * np.eye(x.shape[1])
    expected = np.linalg.lstsq(np.vstack([x, small]), np.vstack([y, 0 * small[:, : y.shape[1]]]))[0].T
    *_, passed = head.look.weight.detach().split(head.parts)
    np.testing.assert_allclose(passed.numpy(), expected, atol=2e-3)
    np.testing.assert_allclose(head.norm.weight.detach().numpy(), np.sqrt((y**2).mean()), rtol=1e-4)


@torch.no_grad()
def test_features_are_brought_to_equal_sizes(tiny: Callable[..., Transformer]) -> None:
    """What the first layer of a head reads has a mean square of 1 in each number, padding left out.

    And a head of one pass begins as that layer and a norm: its block adds nothing.
    """
    target = Transformer(tiny(0).spec, TrainingKernels())
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(0, 97, n), np.ones(n, dtype=bool)) for n in rng.integers(5, 30, 40).tolist()
    ]
    for head in new_heads.block(target, examples), new_heads.eagle3(target, examples, range(9)):
        rows, read = [], []
        assert isinstance(head.fc, torch.nn.Module)
        head.fc.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0]))
        for example in examples:
            _, taps = target(Sequences.of([example]), taps=head.taps)
            taps = [tap[:-2] for tap in taps]  # nothing is known of what comes after the last two
            head.fuse(taps, TargetEnds.of(target))
            rows.append(torch.cat(taps, -1))
        np.testing.assert_allclose(torch.cat(read).square().mean(0), 1, rtol=1e-2)
        if isinstance(head, BlockHead):
            assert not head.blocks[0].attention.o.weight.any()
            assert not head.blocks[0].mlp.down.weight.any()
        assert head.norm.weight.unique().numel() == 1
        before = torch.cat(rows).square().mean(0)
        assert before.max() > 2 * before.min()


@torch.no_grad()
@pytest.mark.parametrize(("units", "join"), [(0, True), (24, True), (24, False)])
def test_the_guesses_of_an_eagle3_head_begin_near_the_next_final_states(
    tiny: Callable[..., Transformer], units: int, join: bool
) -> None:
    """With `join` all of them in a row, since its output is near the state that the next one reads."""
    torch.manual_seed(0)
    target = Transformer(tiny(0).spec, TrainingKernels())
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(0, 97, n), np.ones(n, dtype=bool)) for n in rng.integers(5, 30, 80).tolist()
    ]
    head = new_heads.eagle3(target, examples, range(9), units, join)
    assert head.config.norm_output
    assert not head.head.weight.requires_grad
    assert head.block.mlp.down.weight.shape[1] == (units or target.blocks[0].mlp.down.weight.shape[1])
    batch, ends = Sequences.of(examples), TargetEnds.of(target)
    states, taps = target(batch, taps=head.taps)
    features = head.fuse(taps, ends)

    def errors() -> list[float]:
        """Mean square errors of guesses in a row."""
        found, read = list[float](), features
        for level in (1, 2) if join else (1,):
            rows = batch.rows(slice(level, None))
            columns = read.view(len(examples), -1, read.shape[-1])[:, :-1].flatten(0, 1)
            read = head(head.embed(rows.tokens, ends), columns, rows, None)
            wanted = states.view(*batch.shape, -1)[:, level:].flatten(0, 1)
            found.append(float((read - wanted)[rows.before_answers].square().mean()))
        return found

    own = errors()
    (head.join if join else head.fc).weight.zero_()
    features = head.fuse(taps, ends)
    assert all(fitted < empty - 0.05 for fitted, empty in zip(own, errors(), strict=True))


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "eagle3", "mtp", "block", "redrafter"])
def test_features_are_kept_of_the_layers_that_a_new_head_reads(
    method: str, tiny: Callable[..., Transformer]
) -> None:
    target = Transformer(tiny(0).spec, TrainingKernels())
    examples = [Example(np.arange(9), np.ones(9, dtype=bool))]
    more = {
        "eagle3": (examples, [1, 2]),
        "block": (examples, 2),
        "redrafter": (examples, 2, 16, 16),
    }.get(method, ())
    assert getattr(new_heads, method)(target, *more).taps == new_heads.taps_of(method, target.spec.num_layers)
