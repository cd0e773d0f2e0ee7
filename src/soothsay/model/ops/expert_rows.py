"""What rows of a pass cost in a mixture of experts, where rows of one text share experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WEIGHT = 0.1
"""Weight of a pass in the running mean of `ExpertRows.each`."""

SATURATED = 0.9
"""Share of the most experts that a measured pass ran. Passes of as many rows run nearly all experts whatever
their tokens are, so they say nothing about the tokens."""


class ExpertRows:
    """Counts rows of a pass by the experts that they run, as rows of unrelated tokens.

    A pass reads the weights of each chosen expert once. So it costs as much as a pass of fewer rows, if its
    rows choose the same experts. The rows of a tree usually do, because its nodes are alternatives.

    Args:
        rows: numbers of rows of measured passes, rising.
        experts: the mean number of experts that a layer ran in each of these passes.
    """

    def __init__(self, rows: Sequence[int], experts: Sequence[float]):
        self.rows, self.experts = list(rows), np.maximum.accumulate(experts).tolist()
        self.each = 1.0
        """Rows of unrelated tokens that run as many experts as one more row of a real pass."""

    def __call__(self, rows: int) -> float:
        """The number of rows of unrelated tokens that run as many experts as a real pass of `rows`."""
        return 1 + (rows - 1) * self.each

    def follow(self, rows: int, experts: float) -> None:
        """Learn from a pass of `rows` in which a layer ran `experts` experts on average."""
        usual = np.interp(rows, self.rows, self.experts)
        if rows < 2 or usual >= SATURATED * self.experts[-1]:
            return
        unrelated = np.interp(experts, self.experts, self.rows)
        self.each += WEIGHT * ((unrelated - 1) / (rows - 1) - self.each)
