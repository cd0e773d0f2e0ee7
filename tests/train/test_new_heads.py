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
@pytest.mark.parametrize("units", [0, 24])
def test_an_eagle3_block_begins_by_predicting_what_features_lack(
    tiny: Callable[..., Transformer], units: int
) -> None:
    """Each part of it brings the output nearer to the target's next final state."""
    torch.manual_seed(0)
    target = Transformer(tiny(0).spec, TrainingKernels())
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(0, 97, n), np.ones(n, dtype=bool)) for n in rng.integers(5, 30, 40).tolist()
    ]
    head = new_heads.eagle3(target, examples, range(9), units)
    assert head.config.norm_output
    assert not head.head.weight.requires_grad
    assert head.block.mlp.down.weight.shape[1] == (units or target.blocks[0].mlp.down.weight.shape[1])
    batch, ends = Sequences.of(examples), TargetEnds.of(target)
    wanted, taps = target(batch, taps=head.taps)
    features = head.fuse(taps, ends).view(*batch.shape, -1)[:, :-1].flatten(0, 1)
    rows = batch.rows(slice(1, None))
    wanted = wanted.view(*batch.shape, -1)[:, 1:].flatten(0, 1)
    made: list[torch.Tensor] = []
    head.block.register_forward_hook(lambda _, inputs, out: made.append(out))

    def error() -> float:
        head(head.embed(rows.tokens, ends), features, rows, None)
        return float((made[-1] - wanted)[rows.before_answers].square().mean())

    both = error()
    head.block.mlp.down.weight.zero_()
    attention = error()
    head.block.attention.o.weight.zero_()
    assert both < 0.98 * attention
    assert attention < 0.95 * error()


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
