"""Hydra: that its guesses are what the formula says, each below the ones above it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from one_shot import (
    STRESSES,
    check_grown_tree,
    counting_model,
    made,
    most_features_kept,
    serve,
)
from oracles import hydra_logits, randomize, taps_of

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.drafters.heads.hydra import Hydra, HydraConfig, HydraHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

VARIANTS = {
    "one layer": HydraConfig(hidden_size=48, target_layers=2, num_heads=3),
    "two layers": HydraConfig(48, 2, num_heads=4, num_layers=2),
    "none": HydraConfig(48, 2, num_heads=2, num_layers=0),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stress", STRESSES)
def test_guesses_are_the_likeliest_by_the_formula(stress: str, variant: str, tiny: Make) -> None:
    target, config = tiny(0), VARIANTS[variant]
    head = randomize(HydraHead(config))
    drafter, _ = serve(target, lambda t: Hydra(t, copy.deepcopy(head), width=2, branch=3), stress)
    assert drafter.max_nodes == 1 + 3 + (config.num_heads - 1) * 2 * 3
    guesses = made(drafter)
    for guess in guesses[:: len(guesses) // 25 or 1]:
        (states,) = taps_of(target, guess.tokens[:-1], head.taps)
        below = partial(hydra_logits, head, target, states[-1])
        check_grown_tree(guess, below, width=2, branch=3, depth=config.num_heads)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_that_know_what_comes_are_right(temperature: float) -> None:
    """Each looks at the last guess alone, and sees in it what the target would."""
    vocab = 11
    target = counting_model(vocab)
    head = HydraHead(HydraConfig(vocab, target_layers=1, num_heads=3))
    for linear in head.inputs:
        linear.weight.data.zero_()[:, -vocab:] = torch.eye(vocab) * vocab**0.5  # as the last norm does
    llm = LLM(target, drafter="none", kv_tokens=512, max_tree=4)
    drafter = Hydra(llm.engine.target, head, width=1, branch=1)
    params = SamplingParams(temperature=temperature, max_tokens=41, seed=3)
    result = llm.generate([3], params, drafter=drafter)
    assert len(set(result.token_ids)) > 5
    assert result.token_ids == llm.generate([3], params).token_ids
    assert set(result.stats.acceptance) == {1.0}
    assert result.stats.steps == 1 + 10


def test_features_do_not_pile_up_where_nothing_is_guessed(tiny: Make) -> None:
    assert most_features_kept(tiny(0), lambda t: Hydra(t, HydraHead(VARIANTS["none"]))) <= 10


def test_training_begins_with_the_target_s_own_guess(tiny: Make) -> None:
    target, rows = tiny(0), torch.randn(5, 48)
    head = HydraHead(VARIANTS["two layers"])
    for k in range(4):
        out = head(rows, torch.randn(5, k + 1, 48))
        assert torch.equal(out, rows)
        assert torch.equal(TargetEnds.of(target).logits(out), target.logits(rows))


def test_each_head_learns_by_itself(tiny: Make) -> None:
    head = HydraHead(VARIANTS["one layer"])
    out = head(torch.randn(5, 48), torch.randn(5, 2, 48))
    TargetEnds.of(tiny(0)).logits(out).square().sum().backward()
    learning = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {
        f"{part}.{p}" for part in ("inputs.1", "blocks.1.0.linear") for p in ("weight", "bias")
    }
    weight = head.inputs[1].weight
    assert weight.grad is not None
    assert all(weight.grad[:, i * 48 : (i + 1) * 48].any() for i in range(3)), "the tokens too"


def test_numbers_that_make_no_heads_are_refused(tiny: Make) -> None:
    for heads, layers in ((0, 1), (1, -1)):
        with pytest.raises(DrafterError, match=rf"^hydra with {heads} heads of {layers} layers: it needs"):
            HydraConfig(48, 2, num_heads=heads, num_layers=layers)
    llm = LLM(tiny(0), drafter="none", kv_tokens=64)
    for option in ("width", "branch"):
        with pytest.raises(DrafterError, match=rf"^hydra\(.*{option}=0.*at least 1"):
            Hydra(llm.engine.target, HydraHead(VARIANTS["one layer"]), **{option: 0})
