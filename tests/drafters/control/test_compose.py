"""Cascades and merged drafters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from scripted import FLAT, TARGET, Scripted, World, future, run

from soothsay import SamplingParams
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree, Draws
from soothsay.core.verify import Verdict
from soothsay.drafters.base import Drafter
from soothsay.drafters.control.compose import Cascade, Merged, merge_trees


class Taps(Drafter):
    """Notes its observations and releases."""

    def __init__(self, *taps: int):
        self.taps = taps
        self.seen: list[Observation] = []
        self.released: list[Request] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree(int(request.tokens[-1])) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, request: Request) -> None:
        self.released.append(request)


def request() -> Request:
    params = SamplingParams(temperature=0, max_tokens=10)
    return Request([1, 2, 3], params, seed=0, limit=20, drafter=Taps())


def grow(tree: DraftTree, steps: Mapping[int, float]) -> None:
    """A chain of tokens, each with its log-probability given those before it."""
    node = 0
    for token, log_prob in steps.items():
        node = tree.add(node, token, log_prob)


def random_tree(seed: int) -> DraftTree:
    """A deep tree of few tokens, so that several of them have paths in common."""
    rng, tree = random.Random(seed), DraftTree(7)
    for _ in range(40):
        parent = max(rng.randrange(len(tree)), len(tree) - 4)
        tree.add(max(parent, 0), rng.randrange(3), -2 * rng.random())
    return tree


def shifted(tree: DraftTree) -> DraftTree:
    """The same tree of other tokens."""
    other = DraftTree(tree.tokens[0])
    other.append_nodes([token + 100 for token in tree.tokens[1:]], tree.parents[1:], tree.scores[1:])
    return other


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root to a node."""
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def test_each_part_sees_the_layers_that_it_asked_for_and_every_release() -> None:
    parts = [Taps(4, 2), Taps(), Taps(4)]
    one = Merged(TARGET, parts)
    assert one.taps == (4, 2, 4)
    asked = request()
    trees = one.propose([asked])
    layers = tuple(torch.full((1, 3), float(tap)) for tap in one.taps)
    one.observe([Observation(asked, 2, 1, layers, trees[0], None, Verdict([], [9]))])
    one.release(asked)
    for part in parts:
        assert [int(tap[0, 0]) for tap in part.seen[0].taps] == list(part.taps)
        assert part.released == [asked]


def test_merging_keeps_every_path_and_the_best_scores() -> None:
    a, b = DraftTree(7), DraftTree(7)
    a.extend([1, 2], -0.5)
    b.extend([1, 3], -0.2)
    b.extend([4], -0.9)
    merged = merge_trees([a, b])
    paths = {tuple(merged.tokens[node] for node in path) for path in merged.paths()}
    assert paths == {(7, 1, 2), (7, 1, 3), (7, 4)}
    assert merged.scores[merged.walk([1])[-1]] == pytest.approx(-0.2)
    assert len(a) == 3  # what a drafter has made stays as it was


def test_merged_scores_are_sums_of_steps_at_any_depth() -> None:
    """Better at each step than the other tree: its scores stay, and the other's branch goes on from them."""
    better, worse = DraftTree(7), DraftTree(7)
    grow(better, {1: -0.1, 2: -0.2, 3: -0.3, 4: -0.4})
    grow(worse, {1: -0.5, 2: -0.6, 9: -0.7, 8: -0.8})
    for trees in ([better, worse], [worse, better]):
        merged = merge_trees(trees)
        nodes = merged.walk([1, 2, 3, 4])
        assert [merged.scores[node] for node in nodes] == pytest.approx([0.0, -0.1, -0.3, -0.6, -1.0])
    merged = merge_trees([better, worse])
    nodes = merged.walk([1, 2, 9, 8])
    assert [merged.scores[node] for node in nodes] == pytest.approx([0.0, -0.1, -0.3, -1.0, -1.8])


@pytest.mark.parametrize("seed", range(5))
def test_merging_deep_trees(seed: int) -> None:
    """A node has at least the score that each tree gives it, and no more than its parent's."""
    trees = [random_tree(seed + 10 * number) for number in range(3)]
    merged = merge_trees(trees)
    assert max(merged.depths) > 4
    told = [{path_of(tree, node): tree.scores[node] for node in range(len(tree))} for tree in trees]
    scores = {path_of(merged, node): merged.scores[node] for node in range(len(merged))}
    assert scores.keys() == set().union(*told)
    for path, score in scores.items():
        assert score >= max(own[path] for own in told if path in own) - 1e-9
        assert score <= scores[path[:-1]] if path else score == 0.0
    alone = merge_trees(trees[:1])
    assert (alone.tokens, alone.parents) == (trees[0].tokens, trees[0].parents)
    assert alone.scores == pytest.approx(trees[0].scores)
    apart = merge_trees([trees[0], shifted(trees[1])])  # no guess in common
    assert apart.scores == pytest.approx([*trees[0].scores, *trees[1].scores[1:]])


class Drawing(Taps):
    """Draws two children of the root, and is as sure of them as it is told."""

    def __init__(self, log_prob: float):
        super().__init__()
        self.log_prob, self.max_nodes = log_prob, 3
        self.made: list[DraftTree] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = []
        for request in requests:
            tree = DraftTree(int(request.tokens[-1]))
            for token in (4, 5):
                tree.add(0, token, self.log_prob)
            tree.draws[0] = Draws((4, 5), (self.log_prob,) * 2, np.full(8, 1 / 8), replaced=True)
            trees.append(tree)
        self.made += trees
        return trees


@pytest.mark.parametrize(("sure", "chosen"), [(-0.01, 0), (-6.0, 1)])
def test_a_cascade_offers_no_draws(sure: float, chosen: int) -> None:
    """The cascade chooses a tree by its tokens. So no tree is a fair draw, whichever is chosen."""
    parts = [Drawing(sure), Drawing(-0.5)]
    (tree,) = Cascade(TARGET, parts).propose([request()])
    assert [len(part.made) for part in parts] == [1, chosen]
    assert tree.tokens == [3, 4, 5]
    assert tree.scores[1] == pytest.approx(parts[chosen].log_prob)
    assert not tree.draws


def test_merging_leaves_out_draws() -> None:
    (tree,) = Merged(TARGET, [Drawing(-0.5), Drawing(-0.1)]).propose([request()])
    assert (tree.tokens, tree.draws) == ([3, 4, 5], {})


@pytest.mark.parametrize(("first", "asked"), [(0.95, 0), (0.05, 300)])
def test_a_cascade_asks_the_second_where_the_first_is_bad(first: float, asked: int) -> None:
    world = World(FLAT)
    parts = [Scripted(world, lambda _: first, 0.1), Scripted(world, lambda _: 0.6, 0.1)]
    run(world, Cascade(TARGET, parts), 1, 300)
    assert abs(parts[1].calls - asked) < 40


def test_a_cascade_tells_good_matches_from_bad_ones() -> None:
    """The first drafter is right at every other step, with high scores. There the second is not asked."""

    class Moody(Scripted):
        def _tree(self, request: Request) -> DraftTree:
            tree, here = DraftTree(int(request.tokens[-1])), len(request.tokens)
            sure = here % 2 == 0
            for level in range(4):
                token = future(request, here + level) if sure else 60_000
                tree.extend([token], -0.1 if sure else -2.0, parent=len(tree) - 1)
            return tree

    world = World(FLAT)
    parts = [Moody(world, lambda _: 0.0, 0.1), Scripted(world, lambda _: 0.5, 0.1, depth=2)]
    rate, _ = run(world, Cascade(TARGET, parts), 1, 300)
    assert 50 < parts[1].calls < 250
    for index in range(2):
        world = World(FLAT)
        alone = [Moody(world, lambda _: 0.0, 0.1), Scripted(world, lambda _: 0.5, 0.1, depth=2)][index]
        assert rate > 1.03 * run(world, alone, 1, 300)[0]


def test_a_cascade_forgets_how_good_its_parts_were() -> None:
    world = World(FLAT)
    parts = [Scripted(world, lambda _: 0.05, 0.1), Scripted(world, lambda _: 0.6, 0.1)]
    cascade, asked = Cascade(TARGET, parts), []
    run(world, cascade, 1, 100)
    for forget in (lambda: None, cascade.reset):
        forget()
        calls = parts[1].calls
        run(world, cascade, 1, 1)
        asked.append(parts[1].calls - calls)
    assert asked == [1, 0], "at first, the first part's scores are believed"


def test_all_parts_learn_from_what_waits() -> None:
    class Studious(Taps):
        pieces = 3

        def study(self) -> bool:
            self.pieces -= 1
            return self.pieces > 0

    parts = [Studious(), Studious()]
    one = Merged(TARGET, parts)
    assert [one.study() for _ in range(3)] == [True, True, False]
    assert [part.pieces for part in parts] == [0, 0]


def test_a_part_that_was_trained_for_another_model_is_reported() -> None:
    world = World(FLAT)
    parts = [Scripted(world, lambda _: 0.9, 0.1), Scripted(world, lambda _: 0.0, 0.1)]
    parts[1].trained = True
    with pytest.warns(UserWarning, match="Scripted guessed right in 0 of its first 100 steps"):
        run(world, Merged(TARGET, parts), 1, 120)
