"""Makes trees for drafters that predict all depths at once, such as Medusa and one-pass drafters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soothsay.core.request import Request
from soothsay.core.tenant import PerTenant, Tenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Observation
from soothsay.drafters.trees.template import (
    Ranked,
    Template,
    best_first,
    best_template,
    draw_template,
    fill,
    fill_drawn,
    rank_rows,
    score_rows,
    typical_acceptance,
)
from soothsay.errors import DrafterError
from soothsay.model.kernels import Kernels

TREE_KINDS = ("best-first", "static", "measured")
"""Ways to choose a tree's nodes, see `TreeLayout`."""


class RankAcceptance:
    """Counts how often each rank is right at each depth, if all tokens above it are right.

    Args:
        expected: `[depth][rank]`, rates to begin with.
        weight: number of observed steps that the expected rates count as.
    """

    def __init__(self, expected: Sequence[Sequence[float]], weight: float = 32.0):
        self.weight = weight
        self._right = [[weight * rate for rate in rates] for rates in expected]
        self._seen = [weight] * len(expected)

    def record(self, ranked: Ranked, tokens: Sequence[int]) -> None:
        """Count one step.

        Args:
            ranked: what was predicted, whether it was in the tree or not.
            tokens: what the target emitted after the root. Depth d counts only if there are d tokens: the
                tree had the first d - 1 of them right.
        """
        for right, guesses, token in zip(self._right, ranked, tokens, strict=False):
            for rank, (guess, _) in enumerate(guesses[: len(right)]):
                right[rank] += guess == token
        for depth in range(min(len(self._seen), len(ranked), len(tokens))):
            self._seen[depth] += 1

    @property
    def rates(self) -> list[list[float]]:
        """`[depth][rank]`, in 0 to 1."""
        return [
            [right / seen for right in rights] for rights, seen in zip(self._right, self._seen, strict=True)
        ]


class TreeLayout:
    """Makes one tree of predictions for several depths that do not know of each other.

    Args:
        kind: "best-first" chooses nodes in each step by the drafter's probabilities; "static" always takes
            the tree that is best for typical heads; "measured" takes the tree that is best for the acceptance
            counted so far for the tenant.
        depth: number of depths that are predicted.
        branch: number of ranks at each depth that may be in the tree.
        size: nodes of the largest tree, the root not counted.
        kernels: of the target.

    Raises:
        DrafterError: the kind is not known, or a number is below 1.
    """

    def __init__(self, kind: str, depth: int, branch: int, size: int, kernels: Kernels):
        if kind not in TREE_KINDS:
            raise DrafterError(f"tree={kind!r} is not known; choose {', '.join(TREE_KINDS)}")
        if min(branch, size) < 1:
            raise DrafterError(f"branch={branch}, nodes={size}: each must be at least 1")
        self.kind, self.branch, self.size, self.kernels = kind, branch, size, kernels
        typical = RankAcceptance(typical_acceptance(depth, branch))
        self.acceptance = PerTenant(lambda: RankAcceptance(typical.rates))
        self._static = best_template(typical.rates, size)
        self._proposed: dict[Request, Ranked] = {}  # in this step

    def trees(self, requests: Sequence[Request], logits: Tensor, depths: Sequence[int]) -> list[DraftTree]:
        """Return a tree for each request. `logits` and `depths` are those of `score_rows`."""
        templates = {tenant: self._template(tenant) for tenant in {request.tenant for request in requests}}
        trees = []
        scores = score_rows(requests, logits, depths, self.kernels)
        guesses = rank_rows(scores, depths, self.branch, self.kernels)
        for request, ranked, rows in zip(requests, guesses, torch.split(scores, [*depths]), strict=True):
            tree, size = DraftTree(int(request.tokens[-1])), min(self.size, request.max_nodes - 1)
            deep, guessing = max(request.max_depth, 0), request.params.rule.guessing
            useful = ranked[:deep]
            if guessing.draws:
                drawn = draw_template(guessing, min(deep, len(ranked)), self.branch, size)
                fill_drawn(tree, drawn, [*rows], request)
            elif self.kind == "best-first":
                best_first(tree, useful, size)
            else:
                fill(tree, templates[request.tenant][:size], useful)
                self._proposed[request] = ranked
            trees.append(tree)
        return trees

    def _template(self, tenant: Tenant) -> Template:
        if self.kind == "measured":
            return best_template(self.acceptance[tenant].rates, self.size)
        return self._static

    def observe(self, observations: Sequence[Observation]) -> None:
        """Count which tokens of this step were right."""
        for seen in observations:
            ranked = self._proposed.pop(seen.request, None)
            if ranked is not None and seen.verdict is not None:
                self.acceptance[seen.request.tenant].record(ranked, seen.verdict.tokens)

    def release(self, request: Request) -> None:
        """Forget a request. What was counted stays."""
        self._proposed.pop(request, None)
