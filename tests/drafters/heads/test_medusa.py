"""Medusa: that its guesses are what the formula says, whatever became of the requests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from one_shot import (
    STRESSES,
    check_best_tree,
    counting_model,
    has_near_tie,
    log_probs,
    made,
    most_features_kept,
    serve,
)
from oracles import medusa_logits, randomize, taps_of

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.drafters.heads.medusa import Medusa, MedusaConfig, MedusaHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

CONFIG = MedusaConfig(hidden_size=48, vocab_size=97, target_layers=2, num_heads=3)
VARIANTS = {
    "shared head": CONFIG,
    "own heads": MedusaConfig(48, 97, 2, num_heads=2, num_layers=2, own_heads=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stress", STRESSES)
def test_guesses_are_the_likeliest_by_the_formula(stress: str, variant: str, tiny: Make) -> None:
    target, config = tiny(0), VARIANTS[variant]
    head = randomize(MedusaHead(config))
    drafter, _ = serve(target, lambda t: Medusa(t, copy.deepcopy(head), branch=4), stress)
    guesses = made(drafter)
    for guess in guesses[:: len(guesses) // 25 or 1]:
        (states,) = taps_of(target, guess.tokens[:-1], head.taps)
        logits = medusa_logits(head, target, states[-1])
        if has_near_tie(logits):  # penalties follow the likeliest tokens
            continue
        scores = log_probs(guess, logits)
        check_best_tree(guess, scores, branch=4, size=63)


@pytest.mark.parametrize("kind", ["static", "measured"])
def test_other_trees_change_no_token(kind: str, tiny: Make) -> None:
    head = randomize(MedusaHead(CONFIG))
    drafter, _ = serve(tiny(0), lambda t: Medusa(t, copy.deepcopy(head), tree=kind, nodes=9), "preempted")
    assert max(len(guess.tree) for guess in drafter.guesses) == 10


def test_only_the_first_step_of_a_request_goes_without_guesses(tiny: Make) -> None:
    head = randomize(MedusaHead(CONFIG))
    drafter, _ = serve(tiny(0), lambda t: Medusa(t, copy.deepcopy(head)))
    first: dict[bytes, int] = {}
    for guess in drafter.guesses:
        if guess.max_nodes > 1:
            first.setdefault(guess.request.tokens[: guess.request.num_prompt].tobytes(), len(guess.tokens))
    for guess in drafter.guesses:
        begins = first.get(guess.request.tokens[: guess.request.num_prompt].tobytes()) == len(guess.tokens)
        assert (len(guess.tree) > 1) == (guess.max_nodes > 1 and not begins)


@pytest.mark.parametrize("kind", ["best-first", "static", "measured"])
def test_heads_that_know_what_comes_are_right(kind: str) -> None:
    vocab = 11
    target = counting_model(vocab)
    head = MedusaHead(MedusaConfig(vocab, vocab, target_layers=1, num_heads=3, own_heads=True))
    for k, own in enumerate(head.lm_heads):
        own.weight.data = torch.eye(vocab).roll(k + 2, 0)  # from the token before the root
    llm = LLM(target, drafter="none", kv_tokens=512)
    drafter = Medusa(llm.engine.target, head, tree=kind)
    result = llm.generate([3], SamplingParams(temperature=0, max_tokens=41), drafter=drafter)
    assert result.token_ids == [(4 + i) % vocab for i in range(41)]
    assert set(result.stats.acceptance) == {1.0}
    assert result.stats.steps == 1 + 10


def test_features_do_not_pile_up_where_nothing_is_guessed(tiny: Make) -> None:
    assert most_features_kept(tiny(0), lambda t: Medusa(t, MedusaHead(CONFIG))) <= 10


def test_training_begins_with_the_target_s_own_guess(tiny: Make) -> None:
    target, rows = tiny(0), torch.randn(5, 48)
    head = MedusaHead(CONFIG)
    assert torch.equal(head(rows), rows.expand(3, 5, 48))
    for index in range(3):
        expected = target.logits(rows)
        assert torch.equal(head.logits(head(rows)[index], index, TargetEnds.of(target)), expected)


def test_heads_learn_from_their_own_guesses_alone(tiny: Make) -> None:
    head = MedusaHead(VARIANTS["own heads"])
    head.logits(head(torch.randn(4, 48))[1], 1, TargetEnds.of(tiny(0))).square().sum().backward()
    learning = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.any()}
    expected = {"lm_heads.1.weight"} | {
        f"blocks.1.{j}.linear.{p}" for j in (0, 1) for p in ("weight", "bias")
    }
    assert learning == expected


def test_numbers_that_make_no_heads_are_refused(tiny: Make) -> None:
    for heads, layers in ((0, 1), (1, 0)):
        with pytest.raises(
            DrafterError, match=rf"^medusa with {heads} heads of {layers} layers: each must be"
        ):
            MedusaConfig(48, 97, 2, num_heads=heads, num_layers=layers)
    llm = LLM(tiny(0), drafter="none", kv_tokens=64)
    for option in ("nodes", "branch"):
        with pytest.raises(DrafterError, match=rf"{option}=0.*at least 1"):
            Medusa(llm.engine.target, MedusaHead(CONFIG), **{option: 0})
    with pytest.raises(DrafterError, match="tree='wide' is not known"):
        Medusa(llm.engine.target, MedusaHead(CONFIG), tree="wide")


def test_measured_trees_come_to_prefer_what_is_accepted() -> None:
    """Heads whose second choice is always right."""
    vocab = 11
    target = counting_model(vocab)
    head = MedusaHead(MedusaConfig(vocab, vocab, target_layers=1, num_heads=3, own_heads=True))
    for k, own in enumerate(head.lm_heads):
        own.weight.data = torch.eye(vocab).roll(k + 2, 0) + 2 * torch.eye(vocab).roll(k + 5, 0)
    llm = LLM(target, drafter="none", kv_tokens=2048, max_tree=5)
    drafter = Medusa(llm.engine.target, head, tree="measured")
    params = SamplingParams(temperature=0, max_tokens=100)
    means = [llm.generate([i], params, drafter=drafter).stats.mean_accepted for i in range(3)]
    assert np.argmax(means) > 0
    assert means[0] < means[-1]
    assert means[-1] == pytest.approx(100 / 26, rel=0.01), "three guesses of three, but for the first step"
