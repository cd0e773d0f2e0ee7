"""Trees of depths that are predicted all at once: what is counted, and what grows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafting import GREEDY, make_request
from kernels import OPS
from verifying import match

from soothsay import DrafterError, DraftTree
from soothsay.core.request import Observation, Request
from soothsay.drafters.trees.templates import RankAcceptance, TreeLayout, typical_acceptance


class TestAcceptance:
    def test_expected_rates_until_something_is_seen(self) -> None:
        expected = typical_acceptance(3, 4)
        assert np.allclose(RankAcceptance(expected).rates, expected)

    def test_rates_approach_those_that_are_true(self) -> None:
        true = [[0.2, 0.5, 0.1], [0.6, 0.1, 0.1]]
        counted = RankAcceptance([[0.5, 0.2, 0.1], [0.5, 0.2, 0.1]])
        rng = np.random.default_rng(0)
        for _ in range(4000):
            tokens = [
                10 * (depth + 1) + rng.choice(4, p=[*true[depth], 1 - sum(true[depth])]) for depth in (0, 1)
            ]
            ranked = [[(10 * (depth + 1) + rank, -1.0) for rank in range(3)] for depth in (0, 1)]
            counted.record(ranked, tokens[: 1 + (rng.random() < 0.5)])
        assert np.allclose(counted.rates, true, atol=0.03)

    def test_only_depths_that_the_target_has_spoken_of_count(self) -> None:
        counted = RankAcceptance([[0.5], [0.5]], weight=2)
        counted.record([[(1, 0.0)], [(2, 0.0)]], [1])
        assert counted.rates == [[2 / 3], [0.5]]
        counted.record([[(1, 0.0)], [(2, 0.0)]], [9, 2, 3])
        assert counted.rates == [[0.5], [2 / 3]]
        counted.record([], [9, 2, 3])
        counted.record([[(1, 0.0)]], [1, 2])
        assert counted.rates == [[3 / 5], [2 / 3]]


def guesses_and_truth(right: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits by depth, and the token that has rank `right[d]` at depth d."""
    logits = torch.randn(len(right), 50, generator=torch.Generator().manual_seed(0))
    return logits, [int(row.topk(10).indices[rank]) for row, rank in zip(logits, right, strict=True)]


def steps(layout: TreeLayout, request: Request, count: int, right: Sequence[int]) -> Iterator[DraftTree]:
    """Run steps like the engine. At depth d, the target's token is the draft token of rank `right[d]`."""
    logits, said = guesses_and_truth(right)
    for _ in range(count):
        (tree,) = layout.trees([request], logits, [len(right)])
        draws = [said[depth] if depth < len(said) else 0 for depth in tree.depths]
        verdict = match(tree, draws)
        layout.observe([Observation(request, 0, 3, (), tree, logits, verdict)])
        yield tree


class TestLayout:
    def test_a_measured_tree_grows_towards_what_is_right(self) -> None:
        request = make_request(nodes=5)
        layout = TreeLayout("measured", depth=3, branch=5, size=20, ops=OPS)
        trees = list(steps(layout, request, 150, right=[1, 2, 0]))
        _, said = guesses_and_truth([1, 2, 0])
        assert len(trees[0].walk(said)) < 4
        assert len(trees[-1].walk(said)) == 4
        assert all(len(tree) == 5 for tree in trees)

    def test_a_static_tree_stays(self) -> None:
        request = make_request(nodes=5)
        trees = list(
            steps(
                TreeLayout("static", depth=3, branch=5, size=20, ops=OPS),
                request,
                60,
                right=[1, 2, 0],
            )
        )
        assert all(tree.tokens == trees[0].tokens and tree.parents == trees[0].parents for tree in trees)

    @pytest.mark.parametrize("kind", ["best-first", "static", "measured"])
    def test_trees_are_no_larger_or_deeper_than_is_of_use(self, kind: str) -> None:
        logits = torch.randn(12, 50)
        for nodes, left in ((1, 9), (2, 9), (9, 9), (100, 9), (9, 1), (9, 2), (9, 3)):
            layout = TreeLayout(kind, depth=4, branch=6, size=30, ops=OPS)
            params = replace(GREEDY, max_tokens=left)
            requests = [make_request(params=params, nodes=nodes) for _ in range(3)]
            for tree in layout.trees(requests, logits, [4] * 3):
                assert len(tree) <= min(nodes, 31)
                assert max(tree.depths) <= left - 1
                if left == 9:
                    assert len(tree) == min(nodes, 31)

    def test_what_cannot_be_meant_is_refused(self) -> None:
        with pytest.raises(
            DrafterError, match=r"tree='wide' is not known; choose best-first, static, measured"
        ):
            TreeLayout("wide", 3, 3, 3, OPS)
        for branch, size in ((0, 3), (3, 0)):
            with pytest.raises(
                DrafterError, match=rf"branch={branch}, nodes={size}: each must be at least 1"
            ):
                TreeLayout("static", 3, branch, size, OPS)
