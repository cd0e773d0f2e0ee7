"""Each recipe's losses against a loop over tokens, written from the definitions.

Draft token k after token t reads the features up to token t and the tokens up to t + 1. If the head reads its
own draft tokens, it reads the tokens up to t + 1 + k. The recipe compares draft token k with the target's
distribution of token t + 2 + k. The loop cuts features and tokens to those lengths before a formula sees
them, so the formula cannot look ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from oracles import (
    Eagle3Oracle,
    EagleOracle,
    MTPOracle,
    Oracle,
    Past,
    block_logits,
    block_outputs,
    cell_path,
    hydra_logits,
    listed_logits,
    make_block_head,
    make_eagle3_head,
    make_eagle_head,
    make_mtp_head,
    make_redrafter_head,
    medusa_logits,
    randomize,
    redrafter_outputs,
    rms_norm,
    taps_of,
)
from tiny import TINY
from torch import Tensor

from soothsay.drafters.heads.hydra import HydraConfig, HydraHead
from soothsay.drafters.heads.medusa import MedusaConfig, MedusaHead
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.model.transformer import Transformer
from soothsay.train import whole_models
from soothsay.train.examples import Example
from soothsay.train.heads import (
    BlockRecipe,
    HeadRecipe,
    HydraRecipe,
    MedusaRecipe,
    RecurrentRecipe,
    RedrafterRecipe,
)
from soothsay.train.losses import Divergence
from soothsay.train.sequences import TrainingKernels
from soothsay.train.whole_models import DraftRecipe, LanguageModel

Make = Callable[..., Transformer]

DEPTH = 3
LAST = TINY.num_layers
WEIGHTS = [1.0, 0.8, 0.64]
"""EAGLE-3's weight of each draft token: 0.8 to the power of its depth."""

TOLERANCE = 1e-5
LIKELIEST = 64
"""Tokens of the teacher's vocabulary that recipes keep."""


def conversation(seed: int, length: int, *answers: range) -> Example:
    answer = np.zeros(length, dtype=bool)
    for columns in answers:
        answer[columns] = True
    return Example(np.random.default_rng(seed).integers(0, TINY.vocab_size, length), answer)


EXAMPLES = [
    conversation(1, 15, range(1, 4), range(9, 15)),  # begins to answer at once, and answers to the end
    conversation(2, 13, range(3, 11)),
]
"""Two lengths. Both have eight answer tokens after the second token, so only these columns are anchors."""


def trainable(model: Transformer) -> Transformer:
    """The same weights, on the kernels that train."""
    made = Transformer(model.spec, TrainingKernels())
    made.load_state_dict(model.state_dict())
    return made


def log_softmax(logits: Tensor) -> Tensor:
    return logits.double() - logits.double().logsumexp(-1)


def likeliest(logits: Tensor) -> Tensor:
    """The probabilities of the teacher's likeliest tokens; the others have none."""
    p = log_softmax(logits).exp()
    return p * (p >= p.topk(LIKELIEST).values[-1])


@dataclass
class Guess:
    """The distribution that a formula gives after the feature of one token."""

    logits: Tensor  # [V], or [V_draft] of the tokens that the head can propose
    feature: Tensor | None = None  # [H] EAGLE's prediction of the feature before the draft token


Formula = Callable[[list[int], tuple[Tensor, ...]], Guess]
"""From tokens, and taps `[n, H]` of the first n of them (n < len(tokens)), to the next token's prediction."""


@dataclass
class Taught:
    """The losses of one depth, a value for each draft token."""

    losses: list[float]
    agree: list[bool]
    errors: list[float]


def naive(
    target: Transformer, taps: Sequence[int], formula: Formula, kept: Sequence[int] | None = None
) -> list[Taught]:
    """Compare the draft tokens of each depth with the target, in a loop over all tokens of all examples."""
    taught = [Taught([], [], []) for _ in range(DEPTH)]
    ids = range(TINY.vocab_size) if kept is None else kept
    for example in EXAMPLES:
        tokens, answer = example.tokens.tolist(), example.answer.tolist()
        features = taps_of(target, tokens, [*taps, LAST])
        final = features[-1] / (features[-1].square().mean(-1, keepdim=True) + TINY.norm.eps).sqrt()
        final = final * target.norm.weight
        for t in range(len(tokens)):
            for k in range(DEPTH):
                guessed = t + 2 + k
                if guessed >= len(tokens) or not answer[guessed] or not answer[t + 2]:
                    continue
                guess = formula(tokens[: t + 2 + k], tuple(tap[: t + 1] for tap in features[:-1]))
                log_q = log_softmax(guess.logits)
                said = likeliest(final[guessed - 1] @ target.head.weight.t())
                p = said[list(ids)]
                taught[k].losses.append(float(torch.xlogy(p, p).sum() - (p * log_q).sum()))
                taught[k].agree.append(list(ids)[int(log_q.argmax())] == int(said.argmax()))
                if guess.feature is not None:
                    error = (guess.feature - final[guessed - 1]).abs()
                    smooth = torch.where(error < 1, error.square() / 2, error - 0.5)
                    taught[k].errors.append(float(smooth.mean()))
    return taught


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def recurrent(oracle: Oracle, kept: Sequence[int] | None = None) -> Formula:
    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        out = oracle.output(tokens, taps)
        logits = oracle.logits(out)[0]
        return Guess(logits if kept is None else logits[list(kept)], out[0] if kept is None else None)

    return formula


@dataclass
class Case:
    """A recipe with random weights, and the formula of its head."""

    recipe: HeadRecipe
    formula: Formula
    kept: Sequence[int] | None = None  # the target's tokens that the head can propose; None: all
    regression: float = 0.0


KEPT = range(1, TINY.vocab_size, 3)


def medusa(target: Transformer, own_heads: bool) -> Case:
    head = randomize(MedusaHead(MedusaConfig(48, TINY.vocab_size, LAST, DEPTH, own_heads=own_heads)))

    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        k = len(tokens) - len(taps[0]) - 1
        return Guess(medusa_logits(head, target, taps[0][-1])[k])

    return Case(of(MedusaRecipe, target, head), formula)


def hydra(target: Transformer) -> Case:
    head = randomize(HydraHead(HydraConfig(48, LAST, DEPTH)))

    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        return Guess(hydra_logits(head, target, taps[0][-1], tokens[len(taps[0]) :]))

    return Case(of(HydraRecipe, target, head), formula)


def eagle(target: Transformer, regression: float) -> Case:
    head = make_eagle_head(target, kernels=TrainingKernels())
    recipe = of(RecurrentRecipe, target, head, depth=DEPTH, regression=regression)
    return Case(recipe, recurrent(EagleOracle(head, target)), regression=regression)


def eagle3(target: Transformer) -> Case:
    head = make_eagle3_head(target, says=KEPT, kernels=TrainingKernels())
    recipe = of(RecurrentRecipe, target, head, depth=DEPTH)
    return Case(recipe, recurrent(Eagle3Oracle(head, target), KEPT), KEPT)


def mtp(target: Transformer) -> Case:
    head = make_mtp_head(target, kernels=TrainingKernels())
    return Case(of(RecurrentRecipe, target, head, depth=DEPTH), recurrent(MTPOracle(head, target)))


def block(target: Transformer, shortlist: Sequence[int] = (), cell: int = 0) -> Case:
    made = make_block_head(DEPTH, cell=cell, kernels=TrainingKernels(), shortlist=shortlist)
    head = randomize(made)
    head.borrow(TargetEnds.of(target))

    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        root = len(taps[0])
        if cell:
            outputs = block_outputs(head, target, tokens[: root + 1], len(tokens) - root)
            return Guess(cell_path(head, target, outputs, tokens[root:]))
        logits = block_logits(head, target, tokens[: root + 1], len(tokens) - root)[-1]
        return Guess(logits[list(shortlist)] if shortlist else logits)

    options = {"candidates": 0.0} if cell else {}
    return Case(of(BlockRecipe, target, head, **options), formula, kept=shortlist or None)


def redrafter(target: Transformer, shortlist: Sequence[int] = (), candidates: float = 0.0) -> Case:
    head = randomize(make_redrafter_head(DEPTH, shortlist))
    head.borrow(TargetEnds.of(target))

    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        root = len(taps[0])
        outputs = redrafter_outputs(head, target, torch.cat(taps, -1)[-1], tokens[root])
        logits = cell_path(head, target, outputs, tokens[root:])
        return Guess(logits[list(shortlist)] if shortlist else logits)

    return Case(of(RedrafterRecipe, target, head, candidates=candidates), formula, kept=shortlist or None)


def of(
    kind: type[HeadRecipe], target: Transformer, head: Head, anchors: float = 1.0, **options: object
) -> HeadRecipe:
    return kind(trainable(target), head, lambda _: {}, lambda *_: None, anchors=anchors, **options)


CASES: dict[str, Callable[[Transformer], Case]] = {
    "medusa": lambda target: medusa(target, False),
    "medusa, own heads": lambda target: medusa(target, True),
    "hydra": hydra,
    "eagle": lambda target: eagle(target, 0.0),
    "eagle, regression": lambda target: eagle(target, 0.7),
    "eagle3": eagle3,
    "mtp": mtp,
    "block": lambda target: block(target),
    "block, shortlist": lambda target: block(target, range(1, 97, 2)),
    "block, cell": lambda target: block(target, cell=16),
    "redrafter": redrafter,
    "redrafter, shortlist": lambda target: redrafter(target, range(1, 97, 2)),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_losses_are_those_of_a_loop_over_tokens(name: str, tiny: Make) -> None:
    """Each draft token is compared with the target's distribution at its own position, and no other."""
    target = tiny(0)
    case = CASES[name](target)
    taught = naive(target, case.recipe.head.taps, case.formula, case.kept)
    losses = case.recipe.losses(EXAMPLES, torch.Generator().manual_seed(0))
    assert [len(one.losses) for one in taught] == [16, 13, 10]
    total = 0.0
    for k, one in enumerate(taught):
        loss = mean(one.losses)
        if case.regression:
            assert losses[f"feature_{k + 1}"] == pytest.approx(mean(one.errors), rel=1e-4)
            loss += case.regression * mean(one.errors)
        assert losses[f"loss_{k + 1}"] == pytest.approx(loss, rel=TOLERANCE)
        assert losses[f"agreement_{k + 1}"] == pytest.approx(mean(one.agree), abs=1e-6)
        total += WEIGHTS[k] * loss
    assert losses["loss"] == pytest.approx(total / sum(WEIGHTS), rel=TOLERANCE)


@torch.no_grad()
def test_a_redrafters_candidates_are_taught_before_they_are_refined(tiny: Make) -> None:
    target = tiny(0)
    losses = [
        redrafter(target, (), weight).recipe.losses(EXAMPLES, torch.Generator().manual_seed(0))
        for weight in (0.0, 0.5)
    ]
    head = redrafter(target).recipe.head

    def formula(tokens: list[int], taps: tuple[Tensor, ...]) -> Guess:
        root = len(taps[0])
        outputs = redrafter_outputs(head, target, torch.cat(taps, -1)[-1], tokens[root])
        return Guess(listed_logits(head, target, outputs)[len(tokens) - root - 1])

    raw = naive(target, head.taps, formula, None)
    assert losses[1]["loss_1"] == losses[0]["loss_1"]
    for k in (1, 2):
        added = losses[1][f"loss_{k + 1}"] - losses[0][f"loss_{k + 1}"]
        assert added == pytest.approx(0.5 * mean(raw[k].losses), rel=TOLERANCE)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "block"])
@torch.no_grad()
def test_a_sample_of_anchors_leaves_the_first_guess_at_every_token(name: str, tiny: Make) -> None:
    case = CASES[name](tiny(0))
    case.recipe.anchors = 1.0
    whole = case.recipe.losses(EXAMPLES, torch.Generator().manual_seed(0))
    case.recipe.anchors = 0.3
    part = case.recipe.losses(EXAMPLES, torch.Generator().manual_seed(0))
    torch.testing.assert_close(part["loss_1"], whole["loss_1"])
    assert part["loss_2"] != pytest.approx(float(whole["loss_2"]), rel=1e-2)


@dataclass
class Described:
    """A checkpoint of which only the configuration is read."""

    config: dict[str, Any]


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": 96,
    "num_hidden_layers": TINY.num_layers,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": TINY.norm.eps,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("modules", [0, 1, 2])
@torch.no_grad()
def test_a_language_model_learns_each_next_token_of_all_texts(modules: int) -> None:
    """The model predicts token t + 1 from tokens up to t; module k token t + 2 + k from up to t + 1 + k."""
    recipe = LanguageModel(Described(LLAMA), [], fresh=True, mtp_modules=modules)  # type: ignore[arg-type]
    for parameter in recipe.trained.parameters():
        if parameter.ndim == 2:
            parameter.mul_(3.0)  # sharper distributions: a wrong label costs much
    reference = Transformer(recipe.model.spec)
    reference.load_state_dict(recipe.model.state_dict())
    oracle = None if recipe.mtp is None else MTPOracle(recipe.mtp, reference)
    costs: list[list[float]] = [[] for _ in range(1 + modules)]
    for example in EXAMPLES:
        tokens = example.tokens.tolist()
        for t in range(len(tokens)):
            if t + 1 < len(tokens):
                costs[0].append(-float(log_softmax(answer(reference, tokens[: t + 1]))[tokens[t + 1]]))
            (state,) = taps_of(reference, tokens[: t + 1], [LAST])
            for module in range(modules):
                if oracle is not None and t + 2 + module < len(tokens):
                    out = module_output(oracle, module, tokens[: t + 2 + module], state)
                    costs[1 + module].append(
                        -float(log_softmax(oracle.logits(out)[-1])[tokens[t + 2 + module]])
                    )
    losses = recipe.losses(EXAMPLES, torch.Generator())
    assert [len(cost) for cost in costs] == [26, 24, 22][: 1 + modules]
    expected = mean(costs[0])
    assert losses["lm"] == pytest.approx(expected, rel=1e-5)
    for module in range(modules):
        assert losses[f"mtp_{module + 1}"] == pytest.approx(mean(costs[1 + module]), rel=1e-5)
        expected += 0.3 / modules * mean(costs[1 + module])
    assert losses["loss"] == pytest.approx(expected, rel=1e-5)


def module_output(oracle: MTPOracle, last: int, tokens: Sequence[int], state: Tensor) -> Tensor:
    """`[n, H]` of module `last` at the last n tokens, by DeepSeek-V3's formula. `state` is `[n, H]`.

    Module m at token i reads that token and the output of module m - 1 at token i - 1. Module 0 reads the
    model's output there.
    """
    read, n = oracle.features([state.double()]), len(state)
    for module in range(last + 1):
        slots = torch.arange(module + 1, module + 1 + n)
        embedded = oracle.embed([tokens[slot] for slot in slots])
        read = oracle.forward(embedded, read, slots, Past(), module)
    return read


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "total-variation"])
@torch.no_grad()
def test_a_draft_model_learns_what_the_target_says_of_the_same_tokens(
    divergence: Divergence, tiny: Make
) -> None:
    target, model = tiny(0), tiny(1, num_layers=1, windows=(None,))
    losses = distiller(target, model, divergence=divergence).losses(EXAMPLES, torch.Generator())
    compared = [one for example in EXAMPLES for one in comparisons(target, model, example, divergence)]
    assert len(compared) == 9 + 8
    assert losses["loss"] == pytest.approx(mean([cost for cost, _ in compared]), rel=TOLERANCE)
    assert losses["agreement"] == pytest.approx(mean([agree for _, agree in compared]), abs=1e-6)


@torch.no_grad()
def test_a_draft_model_learns_the_target_on_answers_of_its_own(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first example is cut at a random token of an answer, and the draft model continues it.

    The draft model's distributions are sharp, so it draws the likeliest token. The continuation depends only
    on the cut.
    """
    monkeypatch.setattr(whole_models, "ON_POLICY_TOKENS", 5)
    target, model = tiny(0), tiny(1, num_layers=1, windows=(None,))
    model.head.weight.mul_(1000.0)
    expected = {}
    for cut in np.flatnonzero(EXAMPLES[0].answer):
        tokens = EXAMPLES[0].tokens[:cut].tolist()
        for _ in range(5):
            tokens.append(int(answer(model, tokens).argmax()))
        compared = comparisons(target, model, said_from(tokens, cut)) + comparisons(
            target, model, EXAMPLES[1]
        )
        assert len(compared) == 5 + 8
        expected[cut] = mean([cost for cost, _ in compared])
    recipe = distiller(target, model, on_policy=0.5)
    seen = set()
    for seed in range(12):
        loss = float(recipe.losses(EXAMPLES, torch.Generator().manual_seed(seed))["loss"])
        cuts = [cut for cut, value in expected.items() if loss == pytest.approx(value, rel=TOLERANCE)]
        assert len(cuts) == 1, seed
        seen.update(cuts)
    assert len(seen) >= 5


@torch.no_grad()
def test_a_draft_model_draws_its_own_answers_from_its_distribution(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean loss of many copies of one example is the expected loss over all first tokens."""
    monkeypatch.setattr(whole_models, "ON_POLICY_TOKENS", 2)
    target, model = tiny(0), tiny(1, num_layers=1, windows=(None,))
    model.head.weight.mul_(0.6)
    example = conversation(3, 9, range(6, 7))
    prompt = example.tokens[:6].tolist()
    said = log_softmax(answer(model, prompt)).exp().tolist()
    costs = []
    for token in range(TINY.vocab_size):
        (first, _), (second, _) = comparisons(target, model, said_from([*prompt, token, 0], 6))
        costs.append((first + second) / 2)
    expected = sum(p * cost for p, cost in zip(said, costs, strict=True))
    variance = sum(p * (cost - expected) ** 2 for p, cost in zip(said, costs, strict=True))
    error = (variance / 1024) ** 0.5
    assert abs(costs[int(np.argmax(said))] - expected) > 10 * error  # the likeliest token would be found
    assert abs(mean(costs) - expected) > 10 * error  # and a uniform choice
    recipe = distiller(target, model, on_policy=1.0)
    loss = recipe.losses([example] * 1024, torch.Generator().manual_seed(0))["loss"]
    assert loss == pytest.approx(expected, abs=4 * error)


def distiller(target: Transformer, model: Transformer, **options: Any) -> DraftRecipe:
    return DraftRecipe(trainable(target), trainable(model), lambda _: {}, lambda *_: None, **options)


def said_from(tokens: Sequence[int], cut: int) -> Example:
    """An example whose tokens from `cut` on are to be learned."""
    return Example(np.array(tokens), np.arange(len(tokens)) >= cut)


def comparisons(
    target: Transformer, model: Transformer, example: Example, divergence: Divergence = "forward-kl"
) -> list[tuple[float, bool]]:
    """At each token of an answer: the divergence, and whether the likeliest tokens are the same."""
    tokens, found = example.tokens.tolist(), []
    for t in range(len(tokens) - 1):
        if not example.answer[t + 1]:
            continue
        own, p = log_softmax(answer(model, tokens[: t + 1])), likeliest(answer(target, tokens[: t + 1]))
        q = own.exp()
        cost = {
            "forward-kl": float(torch.xlogy(p, p).sum() - (p * own).sum()),
            "reverse-kl": float((q * (own - p.clamp(min=1e-7).log())).sum()),
            "total-variation": 1 - float(torch.minimum(p, q).sum()),
        }[divergence]
        found.append((cost, bool(own.argmax() == p.argmax())))
    return found


def answer(model: Transformer, tokens: list[int]) -> Tensor:
    """`[V]` logits of the next token."""
    layers = model.spec.num_layers
    (state,) = taps_of(model, tokens, [layers])
    return model.logits(rms_norm(state, model.norm))[-1]
