"""How the rows of a mixture of experts choose their experts."""

from __future__ import annotations

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


def _best(x: Tensor, count: int) -> Tensor:
    """Places of the largest numbers of each row, the first of equal ones: `[N, count]`."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]
