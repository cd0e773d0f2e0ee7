"""Match verification on trees written by hand."""

from __future__ import annotations

import random

import pytest

from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Verdict, match


def tree_of(*chains: list[int]) -> DraftTree:
    tree = DraftTree(9)
    for chain in chains:
        tree.extend(chain)
    return tree


@pytest.mark.parametrize(
    ("tree", "draws", "verdict"),
    [
        pytest.param(tree_of(), [4], Verdict([], [4]), id="plain decoding: the bonus alone"),
        pytest.param(tree_of([1, 2, 3]), [1, 2, 3, 4], Verdict([1, 2, 3], [1, 2, 3, 4]), id="all of a chain"),
        pytest.param(tree_of([1, 2, 3]), [1, 2, 8, 4], Verdict([1, 2], [1, 2, 8]), id="part of a chain"),
        pytest.param(tree_of([1, 2, 3]), [8, 2, 3, 4], Verdict([], [8]), id="nothing, the rest is void"),
        pytest.param(tree_of([1], [2], [3]), [2, 5, 6, 7], Verdict([2], [2, 6]), id="one of three siblings"),
        pytest.param(
            tree_of([1, 2], [3, 2], [3, 4, 5]),  # nodes: 1 2 / 3 4 / 5 6
            [3, 2, 0, 4, 0, 5, 7],
            Verdict([3, 5, 6], [3, 4, 5, 7]),
            id="the last of several paths",
        ),
        pytest.param(
            tree_of([1, 2], [1, 3], [1, 3, 6], [1, 2]),  # nodes: 1, 2, 3, 4
            [1, 3, 0, 6, 5],
            Verdict([1, 3, 4], [1, 3, 6, 5]),
            id="guesses that were merged count once",
        ),
        pytest.param(tree_of([9, 9]), [9, 9, 9], Verdict([1, 2], [9, 9, 9]), id="the root's own token again"),
        pytest.param(tree_of([1], [2, 1]), [2, 0, 0, 1], Verdict([2], [2, 0]), id="draws elsewhere are void"),
    ],
)
def test_the_accepted_path_is_the_one_that_was_drawn(
    tree: DraftTree, draws: list[int], verdict: Verdict
) -> None:
    assert match(tree, draws) == verdict


@pytest.mark.parametrize("seed", range(30))
def test_what_is_emitted_is_what_plain_decoding_would_say(seed: int) -> None:
    """The draw after a node is a function of what has been said, however the tree has come about."""
    rng = random.Random(seed)
    tree = DraftTree(0)
    while len(tree) < 14:
        tree.add(rng.randrange(len(tree)), rng.randrange(3))
    say = {tuple(tree.tokens[n] for n in tree.path(node)[1:]): rng.randrange(3) for node in range(len(tree))}
    said: list[int] = []
    while tuple(said) in say:
        said.append(say[tuple(said)])
    draws = [say[tuple(tree.tokens[n] for n in tree.path(node)[1:])] for node in range(len(tree))]
    verdict = match(tree, draws)
    assert verdict.tokens == said
    assert [tree.tokens[node] for node in verdict.path] == said[:-1]
    assert verdict.path == tree.walk(said[:-1])[1:]
