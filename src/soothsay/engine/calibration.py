"""How often guesses are right, given what a drafter says of them."""

from __future__ import annotations

import math

from soothsay.engine.tree import DraftTree

WIDTH = 0.25
"""Nats of a score that one bin spans."""

BINS = 32
"""From a score of 0 downward; what lies below is in the last one."""

MEMORY = 512.0
"""Guesses that a bin remembers: as new ones come, old ones fade."""

REFRESH = 64
"""Guesses recorded between two looks at the whole."""


class Calibration:
    """From a node's score, the drafter's own log P(the path to it is right), to how often that is so.

    Counts by bins of scores, beginning as if the drafter were honest; estimates never rise as scores fall
    (pool adjacent violators, Ayer et al. 1955), so that whatever keeps the best nodes keeps a tree.

    Args:
        weight: guesses that the drafter's own word counts for in each bin.
    """

    def __init__(self, weight: float = 8.0):
        honest = [math.exp(-WIDTH * (i + 0.5)) for i in range(BINS)]
        self._right = [weight * p for p in honest]
        self._seen = [weight] * BINS
        self._table = honest
        self._new = 0

    def probability(self, score: float) -> float:
        """That a node with this score is right, in 0 to 1."""
        return self._table[min(int(score / -WIDTH), BINS - 1)]

    def probabilities(self, tree: DraftTree) -> list[float]:
        """Of all nodes, the root's 1 included."""
        table, last = self._table, BINS - 1
        known = [table[min(int(score / -WIDTH), last)] for score in tree.scores]
        known[0] = 1.0
        return known

    def record(self, tree: DraftTree, right: set[int]) -> None:
        """Count a tree whose nodes are all known to be right or wrong; `right` has the former."""
        for node in range(1, len(tree)):
            bin_ = min(int(tree.scores[node] / -WIDTH), BINS - 1)
            self._seen[bin_] += 1.0
            if node in right:
                self._right[bin_] += 1.0
        self._new += len(tree) - 1
        if self._new >= REFRESH:
            self._new = 0
            self._refresh()

    def _refresh(self) -> None:
        """Fade what is old, and pool neighbours whose rates rise where they should fall."""
        pools: list[tuple[float, float, int]] = []  # right, seen, bins
        for i in range(BINS):
            fade = min(1.0, MEMORY / self._seen[i])
            self._right[i] *= fade
            self._seen[i] *= fade
            pool = (self._right[i], self._seen[i], 1)
            while pools and pools[-1][0] * pool[1] < pool[0] * pools[-1][1]:
                pool = tuple(a + b for a, b in zip(pools.pop(), pool, strict=True))  # type: ignore[assignment]
            pools.append(pool)
        self._table = [right / seen for right, seen, count in pools for _ in range(count)]


def settle(tree: DraftTree, behind: list[int]) -> list[int] | None:
    """The nodes that are right, in order, if that can be told from the tokens that came behind the root.

    None: the tree has guesses beyond these tokens that may still come true.
    """
    nodes = tree.walk(behind)
    if len(nodes) - 1 == len(behind) and tree.children[nodes[-1]]:
        return None
    return nodes[1:]
