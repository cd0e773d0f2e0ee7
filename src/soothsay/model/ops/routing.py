"""How rows choose their experts, and what the rows of a pass cost where they share experts."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soothsay.core.functions import sigmoid, total
from soothsay.model.specs.feed_forward_spec import RoutingSpec


class RoutingOps:
    """The choice of experts. Kernels may compute it in another way."""

    def route(
        self, scores: Tensor, c: RoutingSpec, correction: Tensor | None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row.

        Args:
            scores: `[N, experts]`, the router's outputs.
            c: how to choose.
            correction: `[experts]` float32, added for the choice alone; None: nothing is.
            scales: `[experts]` float32, factors of the experts' weights; None: there are none.

        Returns:
            Weights `[N, chosen]` float32, and numbers `[N, chosen]` int64 of the experts, the best first.
        """
        scores = scores.float()
        if c.within is not None:
            return _sparsely_mixed(scores, c.chosen, c.within)
        weights = sigmoid(scores) if c.sigmoid else scores.softmax(-1)
        worth = weights if correction is None else weights + correction
        if c.groups > 1:  # a group is worth as much as its best experts
            groups = worth.view(len(worth), c.groups, -1)
            best = total(groups.topk(c.group_best).values)[..., 0]
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _best(best, c.groups_chosen), True)
            worth = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = _best(worth, c.chosen)
        weights = weights.gather(1, chosen)
        if c.normalize:
            weights = weights / (total(weights) + 1e-20)
        weights = weights * c.scale
        return weights if scales is None else weights * scales[chosen], chosen


def _sparsely_mixed(scores: Tensor, count: int, within: float) -> tuple[Tensor, Tensor]:
    """See `RoutingSpec.within`."""
    chosen, weights, left = _best(scores, count), [], scores
    for expert in torch.split(chosen, 1, dim=1):  # [N, 1], the best of those that are left
        top = scores.gather(1, expert)
        far = (top - scores) / scores.abs().clamp(min=top) > within
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, 1), chosen


def _best(x: Tensor, count: int) -> Tensor:
    """Places of the largest numbers of each row, the first of equal ones: `[N, count]`."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]


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
