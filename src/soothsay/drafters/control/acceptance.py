"""Section 3 of docs/controller.md: from a drafter's scores to the probability that a node is right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from soothsay.core.tree import DraftTree

BIN_WIDTH = 0.25
"""Nats of a node's score in one bin of the calibration."""

NUM_BINS = 32
"""Bins from a score of 0 downward. The last one has all lower scores, whose probability is below 0.0005."""

BIN_PRIOR = 2.0
"""Nodes that the drafter's own score counts for in each bin at the start."""

BIN_MEMORY = 512.0
"""Nodes that a bin remembers. Older ones fade, so the calibration follows the text."""

REFRESH_NODES = 64
"""Nodes between two fits of the calibration's table. A fit takes as long as some tens of counts."""

FIRST_REFRESH = 4
"""Nodes before the first fit. The number doubles with each fit, up to `REFRESH_NODES`."""


class AcceptanceCalibration:
    """Maps a node's score to the share of nodes with this score that were right.

    A score is the drafter's own estimate of log P(the path to the node is accepted). The calibration counts
    nodes in bins of the score, and starts as if the drafter were honest. Its probability never rises as the
    score falls (pool adjacent violators, Ayer et al. 1955). So the best-scored nodes always form a tree.
    """

    def __init__(self) -> None:
        honest = [math.exp(-BIN_WIDTH * (i + 0.5)) for i in range(NUM_BINS)]
        self._right = [BIN_PRIOR * p for p in honest]
        self._seen = [BIN_PRIOR] * NUM_BINS
        self._table = honest
        self._new, self._refresh_at = 0, FIRST_REFRESH

    def probability(self, score: float) -> float:
        """The probability, 0 to 1, that a node with this score is right."""
        return self._table[_bins([score])[0]]

    def probabilities(self, tree: DraftTree) -> list[float]:
        """The probability of each node, with 1 for the root."""
        table = self._table
        known = [table[place] for place in _bins(tree.scores)]
        known[0] = 1.0
        return known

    def claimed(self, probability: float) -> float:
        """The smallest probability, by the drafter's own score, whose nodes are right at least this often."""
        too_low = next((i for i, p in enumerate(self._table) if p < probability), NUM_BINS)
        return math.exp(-BIN_WIDTH * too_low)

    def record(self, tree: DraftTree, right: Iterable[int]) -> None:
        """Count the nodes of a tree. `right` has the nodes that were right; all others were wrong."""
        bins, seen = _bins(tree.scores), self._seen
        for place in bins[1:]:
            seen[place] += 1.0
        for node in right:
            self._right[bins[node]] += 1.0
        self._new += len(bins) - 1
        if self._new >= self._refresh_at:
            self._new, self._refresh_at = 0, min(2 * self._refresh_at, REFRESH_NODES)
            self._refresh()

    def _refresh(self) -> None:
        """Fade old counts, and pool neighbouring bins whose rates rise where they should fall."""
        pools: list[tuple[float, float, int]] = []  # right, seen, bins
        for i in range(NUM_BINS):
            fade = min(1.0, BIN_MEMORY / self._seen[i])
            self._right[i] *= fade
            self._seen[i] *= fade
            pool = (self._right[i], self._seen[i], 1)
            while pools and pools[-1][0] * pool[1] < pool[0] * pools[-1][1]:
                pool = tuple(a + b for a, b in zip(pools.pop(), pool, strict=True))  # type: ignore[assignment]
            pools.append(pool)
        self._table = [right / seen for right, seen, count in pools for _ in range(count)]


def _bins(scores: Sequence[float]) -> list[int]:
    """The bin of each score."""
    last = NUM_BINS - 1
    return [place if (place := int(score / -BIN_WIDTH)) < last else last for score in scores]


def right_nodes(tree: DraftTree, tokens: list[int]) -> list[int] | None:
    """The nodes of `tree` that are right, in order of depth, given the tokens that came after its root.

    Returns None if it is too early to tell: the tokens end inside the tree, and nodes below may be right.
    """
    nodes = tree.walk(tokens)
    if len(nodes) - 1 == len(tokens) and nodes[-1] in tree.parents:
        return None
    return nodes[1:]
