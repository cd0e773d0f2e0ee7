"""Trees by rank, against brute force and an exact dynamic program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
from drafting import make_request
from kernels import OPS

from soothsay import DraftTree, SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.drafters.trees.templates import (
    EAGLE_TEMPLATE,
    Ranked,
    best_first,
    best_template,
    fill,
    rank_rows,
    score_rows,
    typical_acceptance,
)

Rates = Sequence[Sequence[float]]


def random_rates(seed: int, depth: int = 3, ranks: int = 3) -> list[list[float]]:
    """Not sorted; the rates of a depth add up to at most 1."""
    rng = np.random.default_rng(seed)
    rates = rng.dirichlet(np.ones(ranks + 1), depth)[:, :ranks]
    rates[rng.random(rates.shape) < 0.1] = 0.0
    return rates.tolist()


def expected_accepted(template: Sequence[Sequence[int]], rates: Rates) -> float:
    """Compute the acceptance length over all outcomes: at each depth one rank is right, or none."""
    paths = {tuple(path) for path in template}
    total = 0.0
    for outcome in product(*(range(-1, len(level)) for level in rates)):
        chance = math.prod(
            level[rank] if rank >= 0 else 1 - sum(level) for level, rank in zip(rates, outcome, strict=True)
        )
        accepted = 0
        while accepted < len(rates) and outcome[: accepted + 1] in paths:
            accepted += 1
        total += chance * accepted
    return total


def best_by_dynamic_program(rates: Rates, size: int) -> float:
    """Most guesses accepted below a node at `depth`, with so many nodes there from rank `rank` on."""

    @cache
    def below(depth: int, rank: int, nodes: int) -> float:
        if nodes == 0 or depth == len(rates) or rank == len(rates[depth]):
            return 0.0
        options = [below(depth, rank + 1, nodes)]
        for own in range(1, nodes + 1):
            value = rates[depth][rank] * (1 + below(depth + 1, 0, own - 1))
            options.append(value + below(depth, rank + 1, nodes - own))
        return max(options)

    return below(0, 0, size)


def is_tree(template: Sequence[Sequence[int]]) -> bool:
    """Whether each path occurs once, after its parent."""
    seen: set[tuple[int, ...]] = {()}
    for path in template:
        if tuple(path) in seen or tuple(path[:-1]) not in seen:
            return False
        seen.add(tuple(path))
    return True


class TestTheBestTemplate:
    @pytest.mark.parametrize("seed", range(8))
    def test_no_other_tree_of_its_size_accepts_more(self, seed: int) -> None:
        rates = random_rates(seed, depth=2, ranks=2)
        every = [(a,) for a in range(2)] + [(a, b) for a in range(2) for b in range(2)]
        for size in range(7):
            template = best_template(rates, size)
            trees = [tree for tree in combinations(every, size) if is_tree(tree)]
            best = max((expected_accepted(tree, rates) for tree in trees), default=0.0)
            assert expected_accepted(template, rates) == pytest.approx(best, abs=1e-12)

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("size", [1, 4, 9, 20])
    def test_it_accepts_what_the_dynamic_program_finds(self, seed: int, size: int) -> None:
        rates = random_rates(seed)
        template = best_template(rates, size)
        assert is_tree(template)
        assert len(template) <= size
        expected = best_by_dynamic_program(rates, size)
        assert expected_accepted(template, rates) == pytest.approx(expected, abs=1e-12)

    def test_its_beginnings_are_the_best_smaller_ones(self) -> None:
        rates = random_rates(3, depth=4, ranks=4)
        largest = best_template(rates, 40)
        for size in range(40):
            assert best_template(rates, size) == largest[:size]

    def test_guesses_that_are_never_right_have_no_place(self) -> None:
        assert best_template([[0.5, 0.0], [0.0, 0.2]], 10) == [(0,), (0, 1)]
        assert best_template([[0.0], [1.0]], 10) == []
        assert best_template([], 10) == []

    def test_a_sure_chain_is_followed_to_its_end(self) -> None:
        assert best_template([[1.0, 1.0]] * 3, 3)[0] == (0,)
        assert best_template([[1.0]] * 3, 5) == [(0,), (0, 0), (0, 0, 0)]


class TestPublishedTrees:
    def test_eagle_s_has_25_nodes_by_depth(self) -> None:
        assert is_tree(EAGLE_TEMPLATE)
        depths = [len(path) for path in EAGLE_TEMPLATE]
        assert [depths.count(depth) for depth in range(1, 7)] == [4, 8, 8, 3, 2, 0]

    def test_typical_heads_make_a_tree_like_medusa_s(self) -> None:
        """Which has 10, 28, 23 and 2 nodes at its four depths."""
        template = best_template(typical_acceptance(4, 10), 63)
        depths = [len(path) for path in template]
        assert is_tree(template)
        assert [depths.count(depth) for depth in range(1, 5)] == pytest.approx([10, 28, 23, 2], abs=3)
        assert template[:4] == [(0,), (0, 0), (1,), (0, 1)]

    def test_typical_rates_are_possible(self) -> None:
        for rates in typical_acceptance(8, 50):
            assert rates[1:] == sorted(rates[1:], reverse=True)
            assert 0 < min(rates) < sum(rates) < 1


RANKED = [
    [(10, -0.1), (11, -1.0), (12, -2.0)],
    [(20, -0.2), (10, -0.9), (22, -3.0)],
    [(30, -0.5), (31, -1.5)],
]


def content(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(tree.tokens[above] for above in tree.path(node)[1:]): tree.scores[node]
        for node in range(1, len(tree))
    }


class TestFilling:
    def test_ranks_become_tokens_and_scores_add_up(self) -> None:
        tree = DraftTree(7)
        fill(tree, [(0,), (2,), (0, 1), (0, 1, 1), (2, 0)], RANKED)
        expected = {(10,): -0.1, (12,): -2.0, (10, 10): -1.0, (10, 10, 31): -2.5, (12, 20): -2.2}
        assert content(tree) == pytest.approx(expected)

    def test_what_is_not_there_is_left_out_with_all_below(self) -> None:
        tree = DraftTree(7)
        fill(tree, [(0,), (3,), (3, 0), (0, 0), (0, 0, 2), (0, 0, 1), (0, 0, 1, 0)], RANKED)
        assert set(content(tree)) == {(10,), (10, 20), (10, 20, 31)}

    def test_no_guesses_no_tree(self) -> None:
        tree = DraftTree(7)
        fill(tree, EAGLE_TEMPLATE, [])
        best_first(tree, [], 10)
        assert len(tree) == 1

    @pytest.mark.parametrize("size", [0, 1, 5, 12, 100])
    def test_best_first_has_the_best_scores_of_all(self, size: int) -> None:
        everything = DraftTree(7)
        fill(everything, [p for d in (1, 2, 3) for p in product(range(3), repeat=d)], RANKED)
        tree = DraftTree(7)
        best_first(tree, RANKED, size)
        assert len(tree) == min(size + 1, 1 + 3 + 9 + 18)
        best = sorted(content(everything).values(), reverse=True)[:size]
        assert sorted(content(tree).values(), reverse=True) == pytest.approx(best)


class TestRanking:
    def logits(self, rows: int, vocab: int = 40) -> torch.Tensor:
        return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3

    def ranked(
        self, requests: list[Request], logits: torch.Tensor, depths: list[int], ranks: int
    ) -> list[Ranked]:
        return rank_rows(score_rows(requests, logits, depths, OPS), depths, ranks, OPS)

    def test_greedy_is_the_likeliest_tokens(self) -> None:
        logits = self.logits(6)
        requests = [make_request(), make_request((4, 5)), make_request()]
        ranked = self.ranked(requests, logits, [3, 1, 2], 4)
        assert [len(guesses) for guesses in ranked] == [3, 1, 2]
        for guesses, row in zip([g for each in ranked for g in each], logits.log_softmax(-1), strict=True):
            values, tokens = row.topk(4)
            assert [token for token, _ in guesses] == tokens.tolist()
            assert [value for _, value in guesses] == pytest.approx(values.tolist())

    def test_the_first_of_each_depth_is_what_the_target_would_draw(self) -> None:
        """Were these its own logits: the noise is that of the position."""
        sampled = SamplingParams(temperature=0.8, top_k=5, seed=4)
        requests = [make_request((1, 2, 3, 4), replace(sampled, seed=seed)) for seed in range(6)]
        logits = self.logits(18)
        ranked = self.ranked(requests, logits, [3] * 6, 9)
        for request, rows, own in zip(requests, logits.split(3), ranked, strict=True):
            for depth, guesses in enumerate(own):
                chain = DraftTree(4)
                chain.extend([0] * depth)
                drawn = perturb(rows[depth : depth + 1], [Nodes(request, chain, [depth])], OPS).argmax()
                assert guesses[0][0] == drawn
                assert len(guesses) == 5, "top_k leaves no more"

    def test_more_ranks_than_tokens_are_all_of_them(self) -> None:
        (ranked,) = self.ranked([make_request()], self.logits(3, vocab=3), [3], 10)
        assert [len(guesses) for guesses in ranked] == [3, 3, 3]
