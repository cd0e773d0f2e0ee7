"""DraftTree against definitions spelled out on random trees."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from soothsay.core.tree import DraftTree

SEEDS = range(30)


def random_tree(seed: int, nodes: int = 12, tokens: int = 4) -> DraftTree:
    """Few tokens, so that some of what is added is there already."""
    rng = random.Random(seed)
    tree = DraftTree(rng.randrange(tokens))
    while len(tree) < nodes:
        tree.add(rng.randrange(len(tree)), rng.randrange(tokens), rng.choice([0.0, -0.5, -1.25, 0.75]))
    return tree


def says(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node, by the parents alone."""
    if tree.parents[node] < 0:
        return (tree.tokens[node],)
    return (*says(tree, tree.parents[node]), tree.tokens[node])


def scores(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Return scores by the tokens on a node's path, which identify it in any numbering."""
    return {says(tree, node): tree.scores[node] for node in range(len(tree))}


def test_a_new_tree_is_its_root_alone() -> None:
    tree = DraftTree(7)
    assert (tree.tokens, tree.parents, tree.depths, tree.scores) == ([7], [-1], [0], [0.0])
    assert (len(tree), tree.paths()) == (1, [[0]])


def test_chains_that_begin_alike_merge_into_a_trie() -> None:
    tree = DraftTree(7)
    assert tree.extend([1, 2, 3]) == 3
    assert tree.extend([1, 2, 9]) == 4
    assert tree.extend([1, 2]) == 2
    assert tree.extend([7], parent=4) == 5
    assert tree.extend([], parent=4) == 4
    assert tree.tokens == [7, 1, 2, 3, 9, 7]
    assert tree.parents == [-1, 0, 1, 2, 2, 4]
    assert tree.depths == [0, 1, 2, 3, 3, 4]
    assert tree.paths() == [[0, 1, 2, 3], [0, 1, 2, 4, 5]]


def test_a_token_that_is_there_keeps_the_better_of_two_scores() -> None:
    tree = DraftTree(0)
    assert tree.add(0, 5, -2.0) == tree.add(0, 5, -1.0) == tree.add(0, 5, -3.0) == 1
    assert (len(tree), tree.scores[1]) == (2, -1.0)
    tree.add(1, 6, -0.5)
    assert tree.scores[2] == -1.5


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_siblings_have_one_token_and_parents_come_first(seed: int) -> None:
    tree = random_tree(seed)
    names = [says(tree, node) for node in range(len(tree))]
    assert len(set(names)) == len(tree)
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert tree.depths == [len(name) - 1 for name in names]


@pytest.mark.parametrize("seed", SEEDS)
def test_scores_never_rise_downward(seed: int) -> None:
    tree = random_tree(seed)
    assert all(tree.scores[node] <= tree.scores[tree.parents[node]] for node in range(1, len(tree)))
    assert min(tree.scores) < 0


@pytest.mark.parametrize("seed", SEEDS)
def test_path_and_paths_run_from_the_root_to_a_node_and_to_every_leaf(seed: int) -> None:
    tree = random_tree(seed)
    for node in range(len(tree)):
        path = tree.path(node)
        assert tuple(tree.tokens[n] for n in path) == says(tree, node)
        assert path[-1] == node
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    assert tree.paths() == [tree.path(leaf) for leaf in leaves]


@pytest.mark.parametrize("seed", SEEDS)
def test_walk_follows_tokens_as_far_as_the_tree_goes(seed: int) -> None:
    tree, rng = random_tree(seed), random.Random(seed)
    names = {says(tree, node): node for node in range(len(tree))}
    for _ in range(20):
        tokens = rng.choices(range(4), k=rng.randrange(5))
        prefixes = [(tree.tokens[0], *tokens[:n]) for n in range(len(tokens) + 1)]
        known = [names[prefix] for prefix in prefixes if prefix in names]
        assert tree.walk(tokens) == known


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("max_nodes", "max_depth"), [(1, 9), (3, 9), (5, 2), (4, 1), (12, 1), (7, 0)])
def test_prune_keeps_the_best_tree_there_is(seed: int, max_nodes: int, max_depth: int) -> None:
    tree = random_tree(seed, nodes=9)
    pruned = tree.prune(max_nodes, max_depth)
    allowed = [node for node in range(1, len(tree)) if tree.depths[node] <= max_depth]
    count = min(max_nodes - 1, len(allowed))
    best = max(
        sum(tree.scores[node] for node in chosen)
        for chosen in combinations(allowed, count)
        if all(tree.parents[node] in (0, *chosen) for node in chosen)  # prefix-closed
    )
    kept, before = scores(pruned), scores(tree)
    assert len(pruned) == count + 1
    assert max(pruned.depths) <= max_depth
    assert sum(kept.values()) == pytest.approx(best)
    assert all(kept[name] == pytest.approx(before[name]) for name in kept)  # the same paths, as likely


@pytest.mark.parametrize("seed", range(10))
def test_pruned_nodes_stay_in_the_order_in_which_they_were_guessed(seed: int) -> None:
    tree = random_tree(seed)
    order = [says(tree, node) for node in range(len(tree))]
    pruned = tree.prune(6, 3)
    kept = [says(pruned, node) for node in range(len(pruned))]
    assert kept == sorted(kept, key=order.index)


def test_of_equal_scores_the_earlier_guess_is_kept() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2])
    tree.extend([3])
    assert tree.prune(3, 9).tokens == [0, 1, 2]


def test_prune_is_the_tree_itself_when_all_of_it_fits() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2, 3])
    assert tree.prune(4, 3) is tree
    assert tree.prune(3, 3) is not tree
    assert tree.prune(4, 2).tokens == [0, 1, 2]
    assert len(tree.prune(0, 9)) == 1, "the root is never pruned"


def test_guesses_thought_impossible_are_legal_and_go_first() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2], log_prob=-math.inf)
    tree.extend([3, 4], log_prob=-1.0)
    assert tree.prune(3, 9).tokens == [0, 3, 4]
    assert tree.prune(4, 9).prune(3, 9).tokens == [0, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "parents"), [([1, 2], [0, 2]), ([1, 2], [-1, 0]), ([1, 2], [1, 0]), ([1, 1], [0, 0])]
)
def test_nodes_in_bulk_that_are_no_tree(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match="a parent comes before its child, from 0 on, and siblings"):
        DraftTree(7).append_nodes(tokens, parents, [0.0, 0.0])


def test_a_probability_that_is_not_a_number_counts_as_impossible() -> None:
    tree = DraftTree(7)
    for token in range(6):
        tree.add(tree.add(0, token, math.nan), 9, -1.0)
    best = tree.add(0, 8, -1.0)
    assert tree.prune(max_nodes=2, max_depth=2).tokens == [7, 8]
    assert set(tree.scores) == {0.0, tree.scores[best], -math.inf}
    assert len(tree.prune(max_nodes=6, max_depth=2)) == 6
