"""Prompt lookup against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from soothsay import DrafterError, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.lookup.exact_matches import PromptLookup, find_matches

TARGET = Target(None, None, EngineConfig(), 0)  # type: ignore[arg-type]


def propose(tokens: Sequence[int], max_tokens: int = 100, **options: int) -> DraftTree:
    drafter = PromptLookup(TARGET, **options)
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(tokens, params, seed=0, limit=len(tokens) + max_tokens, drafter=drafter)
    (tree,) = drafter.propose([request])
    return tree


def says(tree: DraftTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in path[1:]] for path in tree.paths()]


@pytest.mark.parametrize("seed", range(20))
def test_matches_are_those_that_brute_force_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        tokens = rng.integers(0, int(rng.integers(1, 4)), int(rng.integers(1, 30)))
        shortest = int(rng.integers(1, 4))
        longest = shortest + int(rng.integers(0, 5))
        expected = []
        for end in range(1, len(tokens)):
            fitting = [n for n in range(1, end + 1) if (tokens[end - n : end] == tokens[-n:]).all()]
            if length := min(max(fitting, default=0), longest):
                expected.append((end, length))
        expected = [match for match in expected if match[1] >= shortest]
        expected.sort(key=lambda match: (-match[1], -match[0]))  # longest first, of equal ones the latest
        assert find_matches(tokens, longest, shortest) == expected


def test_a_single_token_has_been_nowhere_before() -> None:
    assert find_matches(np.array([4]), 8, 1) == []


def test_it_proposes_what_came_after() -> None:
    assert says(propose([1, 2, 3, 4, 5, 6, 1, 2], num_tokens=3)) == [[3, 4, 5]]
    assert says(propose([1, 2, 3, 1, 2], num_tokens=9)) == [[3, 1, 2]], "as far as there is something to read"


def test_where_nothing_matches_it_proposes_nothing() -> None:
    for tokens in ([1, 2, 3, 4], [9], [1, 2, 3, 2]):
        tree = propose(tokens, min_ngram=2)
        assert (tree.tokens, says(tree)) == ([tokens[-1]], [[]])


def test_continuations_merge_into_a_trie_the_best_first() -> None:
    tokens = [7, 1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 9, 2, 6, 6, 7, 1, 2]
    assert says(propose(tokens, min_ngram=1, num_tokens=2)) == [[3, 4], [3, 5], [6, 6]]
    assert says(propose(tokens, min_ngram=1, num_tokens=2, num_matches=1)) == [[3, 4]]
    assert says(propose(tokens, min_ngram=2, num_tokens=2)) == [[3, 4], [3, 5]]


def test_of_equal_matches_the_latest_comes_first() -> None:
    assert says(propose([1, 2, 3, 1, 2, 4, 1, 2], num_tokens=1)) == [[4], [3]]
    assert says(propose([1, 2, 3, 1, 2, 4, 1, 2], num_tokens=1, num_matches=1)) == [[4]]


def test_a_match_counts_no_longer_than_max_ngram() -> None:
    tokens = [7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]
    assert says(propose(tokens, max_ngram=3, num_matches=1, num_tokens=1)) == [[3]], "three words against two"
    assert says(propose(tokens, max_ngram=2, num_matches=1, num_tokens=1)) == [[4]], "two against two"


def test_a_longer_match_is_trusted_more_and_pruned_last() -> None:
    tokens = [7, 1, 2, 3, 3, 9, 1, 2, 4, 4, 7, 1, 2]
    tree = propose(tokens, num_tokens=2)
    assert says(tree) == [[3, 3], [4, 4]]
    assert tree.scores == sorted(tree.scores[:3], reverse=True) + sorted(tree.scores[3:], reverse=True)
    assert 0 > tree.scores[1] > tree.scores[3]
    assert says(tree.prune(2, 9)) == [[3]]


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (4, 3), (50, 10)])
def test_it_guesses_no_deeper_than_is_of_use(left: int, depth: int) -> None:
    tree = propose([*range(15)] * 2, max_tokens=left)
    assert max(tree.depths) == depth


def test_the_largest_tree_it_proposes_is_the_one_it_announces() -> None:
    drafter = PromptLookup(TARGET, num_tokens=3, num_matches=4, min_ngram=1)
    assert drafter.max_nodes == 13
    tokens = [9, 1, 2, 3, 9, 4, 5, 6, 9, 7, 8, 2, 9, 5, 5, 5, 9, 6, 6, 6, 9]
    assert len(propose(tokens, num_tokens=3, num_matches=4, min_ngram=1)) == 13


@pytest.mark.parametrize(
    "options",
    [
        {"min_ngram": 0},
        {"min_ngram": 4, "max_ngram": 3},
        {"num_tokens": 0},
        {"num_matches": 0},
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(options: dict[str, int]) -> None:
    given = ".*".join(f"{name}={value}" for name, value in sorted(options.items()))
    with pytest.raises(DrafterError, match=rf"^prompt-lookup\(.*{given}"):
        PromptLookup(TARGET, **options)


def test_equal_bounds_are_possible() -> None:
    assert says(propose([1, 2, 3, 1, 2], min_ngram=2, max_ngram=2)) == [[3, 1, 2]]
