"""Trees whose nodes are named by rank, for drafters that predict all depths at once.

A path names, for each depth, the rank of a token among the drafter's predictions there: (1, 0) is "the second
likeliest token, and below it the likeliest one". A template is a list of paths. The best template follows
from how often each rank is right. `TreeLayout` makes trees with it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from soothsay.core.request import Observation, Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.tenant import PerTenant, Tenant
from soothsay.core.transfer import download
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing
from soothsay.drafters.trees.guesses import draw, draw_rates
from soothsay.errors import DrafterError, shown

Template = Sequence[Sequence[int]]
"""Paths of ranks from the first draft token down; 0 is the likeliest. A node's path comes before the paths of
the nodes below it. The root has no path."""

Ranked = Sequence[Sequence[tuple[int, float]]]
"""Predictions for each depth, the likeliest first: tokens, and their log-probabilities if all tokens above
are right."""

EAGLE_TEMPLATE: Template = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The static tree of EAGLE (Li et al. 2024, arXiv 2401.15077): 25 nodes below the root."""


def check_template(template: Template) -> None:
    """Raise `DrafterError` unless these are paths of ranks, each after the one above it."""
    known: set[tuple[int, ...]] = {()}
    try:
        for path in map(tuple, template):
            if path in known or path[:-1] not in known or min(path) < 0:
                raise ValueError
            known.add(path)
        if len(known) < 2:
            raise ValueError
    except (TypeError, ValueError):
        what = f"template={shown(template, 60)} is no tree"
        raise DrafterError(f"{what}: give paths of ranks, such as [[0], [1], [0, 0]]") from None


def typical_acceptance(depth: int, ranks: int) -> list[list[float]]:
    """Return `[depth][rank]`, how often tokens of independent heads are right, before anything is measured.

    The likeliest token is right half the time at depth 1, and 0.6 times as often with each further depth.
    Where it is wrong, the others are right in proportion to rank ** -1.2; the second is right in 15 of 100
    of these cases. With these rates, the best 63 nodes hold 57 of the nodes that Medusa publishes for a 7B
    model, and the best 15 hold 14 of its first 15.
    """
    rates = []
    for level in range(depth):
        first = 0.5 * 0.6**level
        rates.append([first, *((1 - first) * 0.15 * rank**-1.2 for rank in range(1, ranks))])
    return rates


def best_template(acceptance: Sequence[Sequence[float]], size: int) -> Template:
    """Return the tree that accepts the most draft tokens on average.

    If a token is right independently of which token was right above it, the expected number of accepted
    tokens is a sum over all nodes: of the product of the rates along each node's path. No product exceeds the
    product above it, so the `size` largest products are a tree, and it is the best one. Sequoia (Chen et al.
    2024, arXiv 2402.12374) finds this tree by dynamic programming; a heap is faster.

    Args:
        acceptance: `[depth][rank]`, in 0 to 1: how often the token is right if all tokens above it are.
        size: number of nodes, the root not counted.

    Returns:
        At most `size` paths, the most useful first: the first n paths are the best tree of n nodes. Fewer
        paths, if all others have rate 0.

    Example:
        >>> best_template([[0.6, 0.3], [0.4, 0.1]], 3)
        [(0,), (1,), (0, 0)]
    """
    levels = [  # for each depth: the rates above 0 and their ranks, the highest rate first
        sorted(((rate, rank) for rank, rate in enumerate(rates) if rate > 0), key=lambda item: -item[0])
        for rates in acceptance
    ]
    template: list[tuple[int, ...]] = []
    # minus the product along the path, the path, the product above its last node, the last node's place in
    # its level
    heap: list[tuple[float, tuple[int, ...], float, int]] = []

    def push(above: tuple[int, ...], product: float, place: int) -> None:
        if len(above) < len(levels) and place < len(levels[len(above)]):
            rate, rank = levels[len(above)][place]
            heapq.heappush(heap, (-product * rate, (*above, rank), product, place))

    push((), 1.0, 0)
    while heap and len(template) < size:
        product, path, product_above, place = heapq.heappop(heap)
        template.append(path)
        push(path[:-1], product_above, place + 1)
        push(path, -product, 0)
    return template


@lru_cache(maxsize=256)
def draw_template(guessing: Guessing, depth: int, branch: int, size: int) -> Template:
    """Return the tree of drawn tokens that accepts the most on average; ranks are places among the siblings.

    It is fixed, as Sequoia's is (Chen et al. 2024, arXiv 2402.12374): the drawn tokens must not shape it.

    Args:
        guessing: how tokens are drawn.
        depth: the largest depth.
        branch: the largest number of draws below a node.
        size: the largest number of nodes, the root not counted.
    """
    rates = draw_rates(1 if guessing is Guessing.ONE_DRAW else branch)
    return best_template([rates] * depth, size)


def fill_drawn(tree: DraftTree, template: Template, log_q: Sequence[Tensor], request: Request) -> None:
    """Draw the tokens that `template` names. All tokens at depth d + 1 are drawn from `log_q[d]`, `[V]`."""
    counts = Counter(tuple(path[:-1]) for path in template)
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for above, count in counts.items():  # in the order of the template: from the root down
        if above in nodes and len(above) < len(log_q):
            below = draw(tree, nodes[above], log_q[len(above)], count, request)
            nodes |= {(*above, place): node for place, node in below.items()}


def fill(tree: DraftTree, template: Template, ranked: Ranked) -> None:
    """Put the tokens that `template` names into `tree`, below its root.

    A rank that has no token is left out, with everything below it.

    Example:
        >>> tree = DraftTree(7)
        >>> fill(tree, [(0,), (1,), (1, 0), (2,)], [[(5, -0.1), (6, -2.0)], [(8, -0.3)]])
        >>> tree.tokens, tree.parents
        ([7, 5, 6, 8], [-1, 0, 0, 2])
    """
    for path in template:
        node = 0
        for guesses, rank in zip(ranked, path, strict=False):
            if rank >= len(guesses):
                break
            node = tree.add(node, *guesses[rank])


def best_first(tree: DraftTree, ranked: Ranked, size: int) -> None:
    """Put the `size` nodes into `tree` that are likeliest to be accepted by the drafter's own probabilities.

    The method of DDTree (diffusion draft trees, 2026). It treats different depths as independent.
    """
    rates = [[math.exp(log_prob) for _, log_prob in guesses] for guesses in ranked]
    fill(tree, best_template(rates, size), ranked)


def score_rows(
    requests: Sequence[Request],
    logits: Tensor,
    depths: Sequence[int],
    ops: SamplingOps,
    ids: Tensor | None = None,
) -> Tensor:
    """Return `[M, V]` log-probabilities, up to a constant, under each request's parameters and noise.

    Args:
        requests: the requests to draft for.
        logits: `[M, V]` float32: for each request, one row for each depth, from the token after its root on.
        depths: how many of the M rows each request has.
        ops: of the target's device.
        ids: the tokens that the columns stand for, see `perturb`.
    """
    reads = any(r.constraint is not None or r.params.changes_logits for r in requests)
    likeliest, asked, begin = ops.argmax(logits).tolist() if reads else [0] * len(logits), list[Nodes](), 0
    for request, depth in zip(requests, depths, strict=True):
        chain = DraftTree(request.last_token)  # the tokens above matter to penalties only
        chain.extend(likeliest[begin : begin + depth - 1])  # without any, these may be wrong
        asked.append(Nodes(request, chain, range(depth)))
        begin += depth
    return perturb(logits, asked, ops, ids)


def rank_rows(scores: Tensor, depths: Sequence[int], ranks: int, ops: SamplingOps) -> list[Ranked]:
    """Return the `ranks` best tokens of each row of `scores`, `[M, V]`, grouped by request.

    A row has fewer where fewer tokens are possible.
    """
    log_probs, names = download(*ops.largest(scores, ranks, scores.new_ones(len(scores))))
    guesses = [
        [(token, value) for token, value in zip(*row, strict=True) if value > -math.inf]
        for row in zip(names.tolist(), log_probs.tolist(), strict=True)
    ]
    return [guesses[end - depth : end] for depth, end in zip(depths, accumulate(depths), strict=True)]


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
        ops: of the target's device.

    Raises:
        DrafterError: the kind is not known, or a number is below 1.
    """

    def __init__(self, kind: str, depth: int, branch: int, size: int, ops: SamplingOps):
        if kind not in TREE_KINDS:
            raise DrafterError(f"tree={kind!r} is not known; choose {', '.join(TREE_KINDS)}")
        if min(branch, size) < 1:
            raise DrafterError(f"branch={branch}, nodes={size}: each must be at least 1")
        self.kind, self.branch, self.size, self.ops = kind, branch, size, ops
        typical = RankAcceptance(typical_acceptance(depth, branch))
        self.acceptance = PerTenant(lambda: RankAcceptance(typical.rates))
        self._static = best_template(typical.rates, size)
        self._proposed: dict[Request, Ranked] = {}  # in this step

    def trees(self, requests: Sequence[Request], logits: Tensor, depths: Sequence[int]) -> list[DraftTree]:
        """Return a tree for each request. `logits` and `depths` are those of `score_rows`."""
        templates = {tenant: self._template(tenant) for tenant in {request.tenant for request in requests}}
        trees = []
        scores = score_rows(requests, logits, depths, self.ops)
        guesses = rank_rows(scores, depths, self.branch, self.ops)
        if any(request.params.rule.guessing.draws for request in requests):
            scores = scores.cpu()  # in one copy
        for request, ranked, rows in zip(requests, guesses, torch.split(scores, [*depths]), strict=True):
            tree, size = DraftTree(request.last_token), min(self.size, request.max_nodes - 1)
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
