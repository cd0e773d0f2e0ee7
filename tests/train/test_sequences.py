from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import TINY, adapted
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.sequences import Sequences, TrainingKernels, compile_blocks, head_weight

CONFIG = adapted(
    TINY,
    family="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    max_positions=128,
    qkv_bias=True,
    qk_norm=True,
    attention_scale=0.25,
)


def models() -> tuple[Transformer, Transformer]:
    """The same weights on kernels for training and on the reference."""
    torch.manual_seed(0)
    training, reference = Transformer(CONFIG, TrainingKernels()), Transformer(CONFIG, StockKernels())
    reference.load_state_dict(training.state_dict())
    return training, reference


def example(length: int, seed: int) -> Example:
    rng = np.random.default_rng(seed)
    return Example(rng.integers(0, 64, length), rng.random(length) < 0.5)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_sequences_of_several_lengths_equal_each_alone_through_the_reference() -> None:
    training, reference = models()
    examples = [example(length, length) for length in (5, 11, 8)]
    batch = Sequences.of(examples)
    hidden, (tap,) = training(batch, taps=[1])
    for i, one in enumerate(examples):
        n = len(one.tokens)
        alone, (alone_tap,) = reference(Batch.pack([Rows(one.tokens, 0)], group=2), taps=[1])
        close(hidden.view(*batch.shape, -1)[i, :n], alone)
        close(tap.view(*batch.shape, -1)[i, :n], alone_tap)
        assert batch.real[i].tolist() == [True] * n + [False] * (11 - n)
        assert batch.answer[i].tolist() == [*one.answer.tolist(), *[False] * (11 - n)]


@pytest.mark.parametrize("columns", [slice(1, None), slice(0, 4)])
def test_rows_are_a_part_of_every_sequence_where_it_was(columns: slice) -> None:
    batch = Sequences.of([example(9, 0), example(7, 1)])
    part = batch.rows(columns)
    for ours, theirs in ((part.tokens, batch.tokens), (part.positions, batch.positions)):
        assert torch.equal(ours.view(part.shape), theirs.view(batch.shape)[:, columns])
    assert part.slots.tolist() == list(range(len(part.tokens)))


def test_deeper_levels_attend_to_the_anchors_context_and_their_own_chain() -> None:
    """Row (anchor, level) equals the last row of a sequence: the context, then that anchor's chain."""
    training, _ = models()
    block = training.blocks[0]
    sizes, anchors = (2, 6), torch.tensor([[1, 4, 5], [0, 2, 3]])
    batch = Sequences.of([example(6, 0), example(6, 1)])
    inputs = [torch.randn(2, 6 if level == 0 else 3, 32) for level in range(4)]
    kv: Tensor | None = None
    outs = []
    for level, x in enumerate(inputs):
        now = batch if level == 0 else batch.deeper(level, anchors)
        room = torch.empty(4, x.shape[0] * x.shape[1], 16)
        kv = room if kv is None else torch.cat([kv, room], dim=1)
        out = block(x.flatten(0, 1), training.ropes[0](now.positions), now, kv)
        outs.append(out.view(*x.shape))
    for sequence in range(sizes[0]):
        for column, anchor in enumerate(anchors[sequence].tolist()):
            for level in range(1, 4):
                chain = [inputs[deeper][sequence, column] for deeper in range(1, level + 1)]
                x = torch.stack([*inputs[0][sequence, : anchor + 1], *chain])
                alone = Sequences.of([example(len(x), 2)])
                expected = block(x, training.ropes[0](alone.positions), alone, None)[-1]
                close(outs[level][sequence, column], expected)


def test_deeper_rows_have_the_tokens_and_positions_of_later_ones() -> None:
    batch = Sequences.of([example(6, 0)])
    deeper = batch.deeper(2, torch.tensor([[0, 3, 5]]))
    assert deeper.tokens.tolist() == [int(batch.tokens[i]) for i in (2, 5, 5)]
    assert deeper.positions.tolist() == [2, 5, 7]
    assert deeper.slots.tolist() == [9, 10, 11]  # after six rows of level 0 and three of level 1


def test_gradients_flow_through_all_levels() -> None:
    training, _ = models()
    batch, anchors = Sequences.of([example(6, 0)]), torch.tensor([[2, 4]])
    x = torch.randn(6, 32, requires_grad=True)
    kv = torch.empty(4, 6, 16)
    out = training.blocks[0](x, training.ropes[0](batch.positions), batch, kv)
    deeper = batch.deeper(1, anchors)
    kv = torch.cat([kv, torch.empty(4, 2, 16)], dim=1)
    last = training.blocks[0](out[anchors[0]], training.ropes[0](deeper.positions), deeper, kv)
    (gradient,) = torch.autograd.grad(last[0].sum(), x)
    assert (gradient.abs().sum(-1) > 0).tolist() == [True, True, True, False, False, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's own tracing
def test_compiled_blocks_compute_the_same_for_any_number_of_rows() -> None:
    """torch captures a block as one graph. It runs as captured, without being compiled."""
    training, _ = models()
    batches = [Sequences.of([example(6, 0)]), Sequences.of([example(9, 1), example(4, 2)])]
    expected = [training(batch)[0] for batch in batches]
    compile_blocks(training, backend="eager")
    for batch, hidden in zip(batches, expected, strict=True):
        close(training(batch)[0], hidden)


def test_a_scaled_head_has_a_scaled_weight() -> None:
    """Granite's logits, and T5's, are products times a number. Losses see logits."""
    torch.manual_seed(0)
    model = Transformer(replace(CONFIG, head=replace(CONFIG.head, scale=0.25)), TrainingKernels())
    hidden = torch.randn(5, CONFIG.hidden_size)
    torch.testing.assert_close(hidden @ head_weight(model).t(), model.logits(hidden))
