"""Growing the likeliest tree, against exhaustive enumeration."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from soothsay.core.tree import DraftTree
from soothsay.drafters.lookup.backoff import LEAST, Followers, Source, grow

Words = tuple[int, ...]


class Table(Source[Words]):
    """Random counts after each context of up to two tokens, and a random discount."""

    def __init__(self, seed: int, letters: int = 3):
        self.rng = np.random.default_rng(seed)
        self.letters = letters
        self.counts: dict[Words, Followers] = {}

    def followers(self, context: Words) -> Followers:
        if context not in self.counts:
            tokens = self.rng.permutation(self.letters)[: int(self.rng.integers(0, self.letters + 1))]
            counts = [(int(token), int(self.rng.integers(1, 9))) for token in tokens]
            total = sum(count for _, count in counts)
            self.counts[context] = Followers(counts, total, len(counts), float(self.rng.uniform(0.1, 1.0)))
        return self.counts[context]

    def shorter(self, context: Words) -> Words | None:
        return context[1:] if len(context) > 1 else None

    def after(self, context: Words, token: int) -> Words:
        return (*context, token)[-2:]

    def guesses(self, context: Words) -> dict[int, float]:
        """Each token by the longest context that has it."""
        found: dict[int, float] = {}
        left = 1.0
        step: Words | None = context
        while step is not None:
            counts, total, distinct, doubt = self.followers(step)
            for token, count in counts:
                found[token] = max(found.get(token, 0.0), left * (count - doubt) / total)
            left *= min(doubt * distinct / total, 1.0) if total else 1.0
            step = self.shorter(step)
        return found


def enumerate_paths(table: Table, depth: int) -> dict[Words, float]:
    paths: dict[Words, float] = {(): 1.0}
    level = {(): ((7, 8), 1.0)}
    for _ in range(depth):
        below = {}
        for path, (context, probability) in level.items():
            for token, guess in table.guesses(context).items():
                if probability * guess > LEAST:
                    below[(*path, token)] = (table.after(context, token), probability * guess)
        paths |= {path: probability for path, (_, probability) in below.items()}
        level = below
    return paths


def says(tree: DraftTree) -> dict[Words, float]:
    return {
        tuple(tree.tokens[n] for n in tree.path(node)[1:]): math.exp(tree.scores[node])
        for node in range(len(tree))
    }


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_the_likeliest_paths_of_all(seed: int) -> None:
    table = Table(seed)
    expected = enumerate_paths(table, depth=4)
    tree = DraftTree(8)
    grow(tree, [(table, (7, 8))], nodes=10_000, depth=4)
    assert says(tree) == pytest.approx(expected)
    best = sorted(expected.values(), reverse=True)
    for nodes in (1, 2, 5, 9):
        tree = DraftTree(8)
        grow(tree, [(table, (7, 8))], nodes, depth=4)
        assert len(tree) == min(nodes, len(expected))
        assert sorted(says(tree).values(), reverse=True) == pytest.approx(best[: len(tree)])
        assert all(above >= below for above, below in pairwise(tree.scores)), "the best first"


@pytest.mark.parametrize("seed", range(10))
def test_of_two_sources_the_surer_counts(seed: int) -> None:
    tables = [Table(seed), Table(seed + 100)]
    expected: dict[Words, float] = {}
    for table in tables:
        for path, probability in enumerate_paths(table, depth=1).items():
            expected[path] = max(expected.get(path, 0.0), probability)
    tree = DraftTree(8)
    grow(tree, [(table, (7, 8)) for table in tables], nodes=100, depth=1)
    assert says(tree) == pytest.approx(expected)


def test_nowhere_to_begin_and_no_room_to_go() -> None:
    for starts, nodes, depth in (([], 9, 9), ([(Table(0), (7, 8))], 1, 9), ([(Table(0), (7, 8))], 9, 0)):
        tree = DraftTree(8)
        grow(tree, starts, nodes, depth)
        assert len(tree) == 1
