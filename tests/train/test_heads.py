"""What heads learn from a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.specs.attention_spec import RopeSpec
from soothsay.model.transformer import Transformer
from soothsay.train import new_heads
from soothsay.train.examples import Example
from soothsay.train.heads import RecurrentRecipe
from soothsay.train.sequences import Seen, Sequences, TrainingKernels


def conversation(length: int, *answers: range) -> Example:
    answer = np.zeros(length, dtype=bool)
    for columns in answers:
        answer[columns.start : columns.stop] = True
    return Example(np.arange(length), answer)


def seen(*examples: Example) -> Seen:
    nothing = torch.empty(0)
    return Seen(Sequences.of(examples), nothing, nothing, nothing, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_guesses_are_learned_where_an_answer_goes_on_two_tokens_further(share: float) -> None:
    """Each call draws a share of the columns. A shorter answer is filled up with other columns."""
    batch = seen(conversation(100, range(20, 30), range(60, 70)), conversation(90, range(80, 88)))
    places = [{*range(18, 28), *range(58, 68)}, {*range(78, 86)}]
    drawn = batch.anchors(share)
    count = round(20 * share)
    assert drawn.shape == (2, count)
    for columns, where in zip(drawn.tolist(), places, strict=True):
        assert columns == sorted({*columns})
        assert len(where & {*columns}) == min(count, len(where))
        assert 0 <= columns[0] <= columns[-1] < 99
    assert drawn.tolist() != batch.anchors(share).tolist()


def test_where_nobody_answers_there_is_an_anchor_nevertheless() -> None:
    assert seen(conversation(9), conversation(5)).anchors(0.5).shape == (2, 1)


@pytest.mark.parametrize("regression", [0.0, 1.0])
def test_answers_that_are_shorter_than_a_draft_teach_what_they_can(
    tiny: Callable[..., Transformer], regression: float
) -> None:
    """The answer has no fourth token, so the deepest draft tokens have a loss of 0, not 0 / 0."""
    target = Transformer(tiny(1).spec, TrainingKernels())
    recipe = RecurrentRecipe(
        target, new_heads.eagle(target), lambda _: {}, lambda *_: None, depth=5, regression=regression
    )
    losses = recipe.losses([conversation(20, range(12, 14))], torch.Generator().manual_seed(0))
    assert all(value.isfinite() for value in losses.values())
    assert losses["loss_1"] > 0
    assert losses["loss_5"] == 0
    losses["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in recipe.head.parameters())


def new_block(target: Transformer) -> Head:
    return new_heads.block(Transformer(target.spec, TrainingKernels()), [conversation(20, range(12, 14))])


@pytest.mark.parametrize("make", [new_heads.eagle, new_heads.mtp, new_block])
def test_blocks_of_heads_rotate_as_llamas(
    make: Callable[[Transformer], Head], tiny: Callable[..., Transformer]
) -> None:
    """Also for a target that rotates a part of each head, with factors for this part."""
    rope = RopeSpec(kind="longrope", original_max_positions=64, long_factors=(1.0,) * 4, context=512)
    head = make(tiny(0, rope=rope, rotary_dim=8))
    assert head.rope.signed.ne(0).all()
    assert not head.rope.is_scaled


@pytest.mark.parametrize("changes", [{"parallel": True}, {"pre_norms": False, "post_norms": True}])
def test_targets_whose_blocks_heads_do_not_have(
    changes: dict[str, bool], tiny: Callable[..., Transformer]
) -> None:
    with pytest.raises(DrafterError, match="no head is made of blocks as family 'llama' has them"):
        new_heads.eagle(tiny(0, **changes))
