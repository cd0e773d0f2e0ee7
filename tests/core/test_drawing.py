"""Draws without the scores of all tokens, against the best of all scores."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from kernels import SETS, STOCK, opened
from torch import Tensor

from soothsay import DraftTree, SamplingParams
from soothsay.core.drawing import CONTENDERS
from soothsay.core.noise import noise_key
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, draw, perturb
from soothsay.core.sampling_ops import DrawnTree, SamplingOps
from soothsay.core.verify import Verdict
from soothsay.drafters.base import NoDrafter
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.native.native_sampling import NativeSampling

WIDTHS = (1, 7, 16, 100, 5000, 151_936)
PARAMS = [
    SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m)
    for t, p, k, m in product((0.05, 1.0, 3.0), (1.0, 0.9, 0.2), (0, 1, 20, 300), (0.0, 0.05))
]


@pytest.fixture(params=("stock", *SETS))
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    return STOCK.sampling if request.param == "stock" else opened(NativeKernels, request.param).sampling


def nodes_of(params: SamplingParams, count: int, seed: int = 9) -> Nodes:
    request = Request([1, 2, 3], params, seed=seed, limit=40, drafter=NoDrafter(None))  # type: ignore[arg-type]
    tree = DraftTree(3)
    tree.extend([5] * (count - 1))
    return Nodes(request, tree, range(count))


def check(logits: Tensor, asked: list[Nodes], ops: SamplingOps) -> list[int]:
    tokens, scores = draw(logits, asked, ops).wait()
    expected = perturb(logits, asked, ops)
    assert tokens == ops.argmax(expected).tolist()
    best = [expected[row, token].item() for row, token in enumerate(tokens)]
    assert scores == pytest.approx(best, rel=0, abs=0, nan_ok=True)
    return tokens


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_is_the_best_of_all_scores(ops: SamplingOps, width: int) -> None:
    """Peaked and flat logits; many requests in one step, or one alone, with the same draws."""
    generator = torch.Generator().manual_seed(width)
    many = PARAMS if width < 10_000 else PARAMS[::7]
    for sharpness in (0.3, 4.0):
        logits = sharpness * torch.randn(2 * len(many) + 2, width, generator=generator)
        asked = [nodes_of(params, 2, seed) for seed, params in enumerate(many)]
        asked.append(nodes_of(SamplingParams(temperature=0), 2))
        tokens = check(logits, asked, ops)
        for place in range(0, len(asked), 5):
            rows = slice(2 * place, 2 * place + 2)
            assert draw(logits[rows], asked[place : place + 1], ops).wait()[0] == tokens[rows]


def test_equal_logits_and_few_that_are_allowed(ops: SamplingOps) -> None:
    logits = torch.full((4, 300), -math.inf)
    logits[0, 299], logits[0, 70] = 3.0, 2.0
    logits[1, 5] = -1e4
    logits[2, 30:230] = 1.0
    logits[3, :100] = 2.0
    for params in PARAMS:
        check(logits, [nodes_of(params, 4)], ops)


def test_what_contenders_do_not_decide(ops: SamplingOps) -> None:
    """Top-p keeps one token, which does not win the race against thousands of equal ones."""
    logits = torch.zeros(1, 5000)
    logits[0, 4321] = 5.0
    won = 0
    for seed in range(40):
        nodes = nodes_of(SamplingParams(temperature=1.0, top_p=0.01), 1, seed)
        assert check(logits, [nodes], ops) == [4321]
        key = torch.tensor([noise_key(seed, 3)])
        won += 4321 in ops.race(logits, torch.ones(1), key, CONTENDERS)[1]
    assert won < 40


def test_parameters_that_change_logits(ops: SamplingOps) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    params = SamplingParams(temperature=1.0, logit_bias={7: 50.0}, top_p=0.9)
    assert check(logits, [nodes_of(params, 3)], ops) == [7, 7, 7]
    assert torch.equal(logits, before)


def tree_of_draws(request: Request, logits: Tensor, ops: SamplingOps) -> tuple[DraftTree, Verdict]:
    """A tree with three draws in a row and a wrong token beside each, and its verdict."""
    tree, path, tokens, node = DraftTree(3), list[int](), list[int](), 0
    while True:
        tokens += draw(logits[node : node + 1], [Nodes(request, tree, [node])], ops).wait()[0]
        if len(path) == 3:
            return tree, Verdict(path, tokens)
        tree.add(node, (tokens[-1] + 1) % logits.shape[1])
        node = tree.add(node, tokens[-1])
        path.append(node)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_draws_are_followed_along_trees(ops: SamplingOps, temperature: float) -> None:
    """One operation gives the verdicts of draw by draw, for several trees."""
    logits = 4 * torch.randn(1 + 4 * 7, 300, generator=torch.Generator().manual_seed(3))
    asked, expected = [], []
    for seed in range(4):
        request = nodes_of(SamplingParams(temperature=temperature), 1, seed).request
        first = 1 + 7 * seed
        tree, verdict = tree_of_draws(request, logits[first : first + 7], ops)
        asked.append(DrawnTree(tree, first, temperature, seed, len(request.tokens)))
        expected.append(verdict)
    found = ops.follow(logits, asked)
    assert found == (expected if isinstance(ops, NativeSampling) else [None] * 4)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, 0.0])
def test_draws_that_are_not_finite_stay_open(ops: SamplingOps, value: float) -> None:
    logits = torch.full((2, 300), value)
    for seed, temperature in product(range(20), (0.0, 1e6)):
        request = nodes_of(SamplingParams(temperature=temperature), 1, seed).request
        [found] = ops.follow(logits, [DrawnTree(DraftTree(3), 1, temperature, seed, len(request.tokens))])
        expected = draw(logits[1:], [Nodes(request, DraftTree(3), [0])], ops).wait()[0]
        is_known = value == 0.0 and isinstance(ops, NativeSampling)
        assert found == (Verdict([], expected) if is_known else None)


def test_nothing_is_left_to_draw(ops: SamplingOps) -> None:
    for value in (-math.inf, math.nan):
        for params in (SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0)):
            tokens, scores = draw(torch.full((2, 300), value), [nodes_of(params, 2)], ops).wait()
            assert all(0 <= token < 300 for token in tokens)
            assert not any(map(math.isfinite, scores))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_mass_before_a_place(ops: SamplingOps, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (4 * torch.randn(5, width, generator=generator)).round(decimals=1)  # many are equal
    factors = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    places = torch.randint(0, width, (5,), generator=generator)
    tops = x.amax(-1)
    floors = torch.tensor([-math.inf, -math.inf, *(tops[2:] - 5).tolist()])
    floors = floors.minimum(x.gather(1, places[:, None])[:, 0])
    order = x.sort(dim=-1, descending=True, stable=True).indices
    kept = x.masked_fill(x < floors[:, None], -math.inf)
    p = (kept.double() * factors[:, None]).softmax(-1).gather(1, order)
    rank = (order == places[:, None]).int().argmax(-1)
    expected = (p.cumsum(-1) - p).gather(1, rank[:, None])[:, 0]
    before = ops.mass_before(x, factors, tops, floors, places)
    torch.testing.assert_close(before, expected.float(), rtol=0, atol=1e-4)


def test_of_equal_scores_the_first_is_drawn(ops: SamplingOps) -> None:
    """At a temperature so low that logits absorb the noise."""
    logits = torch.full((1, 400), 1000.0)
    logits[0, :200] = 999.0
    for seed in range(5):
        assert check(logits, [nodes_of(SamplingParams(temperature=1e-6), 1, seed)], ops) == [200]
