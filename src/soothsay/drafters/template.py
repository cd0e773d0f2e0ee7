"""Trees laid out by rank: a node is "the second guess, and below it the likeliest one", whatever these are.

A path names, for each depth, the rank among a drafter's guesses there; a template is a list of paths. Which
template is best follows from how often each rank is right.
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

from soothsay.drafters.base import Observation
from soothsay.drafters.guesses import draw, draw_rates, largest
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes, best_tokens, perturb
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Guessing
from soothsay.errors import DrafterError

Template = Sequence[Sequence[int]]
"""Paths: ranks from the first guess down, 0 for the likeliest. Those above come before those below them; the
root is not among them."""

Ranked = Sequence[Sequence[tuple[int, float]]]
"""Guesses for each depth, likeliest first: tokens and their log-probabilities given all before were right."""

KINDS = ("best-first", "static", "measured")

EAGLE_TEMPLATE: Template = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The static tree of EAGLE (Li et al. 2024, arXiv 2401.15077), its 25 nodes below the root."""


def typical_acceptance(depth: int, ranks: int) -> list[list[float]]:
    """How often guesses of independent heads are right, `[depth][rank]`, before anything is measured.

    The likeliest guess is right half the time, and 0.6 times as often with each depth; where it is wrong, the
    others are right in proportion to rank ** -1.2, the second 15 times in 100. Under these rates the best 63
    nodes are 57 of those that Medusa publishes for a 7B model, and the best 15 are 14 of its first 15.
    """
    rates = []
    for level in range(depth):
        first = 0.5 * 0.6**level
        rates.append([first, *((1 - first) * 0.15 * rank**-1.2 for rank in range(1, ranks))])
    return rates


def best_template(acceptance: Sequence[Sequence[float]], size: int) -> Template:
    """The tree that accepts most guesses on average.

    Where guesses at one depth are right independently of which was right above, the expected number of
    accepted guesses is the sum over all nodes of the products along their paths. No product exceeds the one
    above it, so the `size` largest are a tree, and the best: Sequoia (Chen et al. 2024, arXiv 2402.12374)
    finds it by dynamic programming, a heap faster.

    Args:
        acceptance: `[depth][rank]`, in 0 to 1: how often that guess is right if all before were.
        size: nodes, the root not counted.

    Returns:
        At most `size` paths, the most useful first, so that its beginnings are the best smaller trees; less
        where no others are ever right.
    """
    levels = [  # by place: the rates above 0 and their ranks, the highest first
        sorted(((rate, rank) for rank, rate in enumerate(rates) if rate > 0), key=lambda item: -item[0])
        for rates in acceptance
    ]
    template: list[tuple[int, ...]] = []
    # minus the product along the path, the path, the product above its last node, its last node's place
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
    """The tree of at most `size` guesses that are drawn which accepts most, no deeper than `depth`, with no
    more than `branch` draws at a node. A rank is a draw's place among its siblings.

    It is fixed, as Sequoia's (Chen et al. 2024, arXiv 2402.12374): what was drawn must not shape the tree.
    """
    rates = draw_rates(1 if guessing is Guessing.ONE_DRAW else branch)
    return best_template([rates] * depth, size)


def fill_drawn(tree: DraftTree, template: Template, log_q: Sequence[Tensor], request: Request) -> None:
    """Draw the guesses that `template` names; those at depth d + 1 from `log_q[d]`, `[V]`, whatever is above
    them.
    """
    counts = Counter(tuple(path[:-1]) for path in template)
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for above, count in counts.items():  # in the order of the template, so from the root down
        if above in nodes and len(above) < len(log_q):
            below = draw(tree, nodes[above], log_q[len(above)], count, request)
            nodes |= {(*above, place): node for place, node in below.items()}


def fill(tree: DraftTree, template: Template, ranked: Ranked) -> None:
    """Put the guesses that `template` names into `tree`, below its root; those that are not there are left
    out, and so is what is below them.
    """
    for path in template:
        node = 0
        for guesses, rank in zip(ranked, path, strict=False):
            if rank >= len(guesses):
                break
            node = tree.add(node, *guesses[rank])


def best_first(tree: DraftTree, ranked: Ranked, size: int) -> None:
    """Put in the `size` nodes that are likeliest to be right by the drafter's own account.

    The idea of DDTree (diffusion draft trees, 2026): guesses at different depths are taken for independent.
    """
    rates = [[math.exp(log_prob) for _, log_prob in guesses] for guesses in ranked]
    fill(tree, best_template(rates, size), ranked)


def rank_guesses(
    requests: Sequence[Request], logits: Tensor, depths: Sequence[int], ranks: int
) -> list[Ranked]:
    """The likeliest tokens at each depth, under each request's sampling parameters and noise.

    Args:
        requests: whose tokens are guessed.
        logits: `[M, V]` float32: for each request, of the first tokens behind its root.
        depths: how many of the M rows are each request's.
        ranks: guesses at each depth; fewer where fewer tokens are possible.
    """
    return _rank(_scores(requests, logits, depths), depths, ranks)


def _scores(requests: Sequence[Request], logits: Tensor, depths: Sequence[int]) -> Tensor:
    """`[M, V]` log-probabilities, up to a constant, under each request's sampling parameters and noise."""
    likeliest, asked, begin = best_tokens(logits), [], 0
    for request, depth in zip(requests, depths, strict=True):
        chain = DraftTree(int(request.tokens[-1]))  # what stands above a guess matters to penalties alone
        chain.extend(likeliest[begin : begin + depth - 1])
        asked.append(Nodes(request, chain, range(depth)))
        begin += depth
    return perturb(logits, asked)


def _rank(scores: Tensor, depths: Sequence[int], ranks: int) -> list[Ranked]:
    values, tokens = largest(scores, ranks, scores.new_ones(len(scores)))
    guesses = [
        [(token, value) for token, value in zip(*row, strict=True) if value > -math.inf]
        for row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    return [guesses[end - depth : end] for depth, end in zip(depths, accumulate(depths), strict=True)]


class Acceptance:
    """How often each rank has been right at each depth, given that all before it were.

    It begins with expected rates, which count as much as `weight` steps that have been seen.
    """

    def __init__(self, expected: Sequence[Sequence[float]], weight: float = 32.0):
        self.weight = weight
        self._right = [[weight * rate for rate in rates] for rates in expected]
        self._seen = [weight] * len(expected)

    def record(self, ranked: Ranked, tokens: Sequence[int]) -> None:
        """Count one step: what was guessed, in the tree or not, and what the target said from there on.

        Depth d counts only where the target's words are known that far; that is where the tree had the first
        d - 1 of them right.
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


class Layout:
    """How guesses of heads that do not know of each other become a tree.

    Args:
        kind: "best-first" trusts the heads' confidence, step by step; "static" is the best tree for typical
            heads; "measured" is the best for the acceptance seen so far.
        depth: tokens that are guessed in a row.
        branch: ranks of each depth that may stand in the tree.
        size: nodes of the largest tree, the root not counted.

    Raises `DrafterError` for another kind, and for numbers below 1.
    """

    def __init__(self, kind: str, depth: int, branch: int, size: int):
        if kind not in KINDS:
            raise DrafterError(f"tree={kind!r} is not known; choose {', '.join(KINDS)}")
        if min(branch, size) < 1:
            raise DrafterError(f"branch={branch}, nodes={size}: each must be at least 1")
        self.kind, self.branch, self.size = kind, branch, size
        self.acceptance = Acceptance(typical_acceptance(depth, branch))
        self._static = best_template(self.acceptance.rates, size)
        self._guessed: dict[Request, Ranked] = {}  # in this step

    def trees(self, requests: Sequence[Request], logits: Tensor, depths: Sequence[int]) -> list[DraftTree]:
        """A tree for each request; `logits` and `depths` as in `rank_guesses`."""
        template = self._static
        if self.kind == "measured":
            template = best_template(self.acceptance.rates, self.size)
        trees = []
        scores = _scores(requests, logits, depths)
        guesses = _rank(scores, depths, self.branch)
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
                fill(tree, template[:size], useful)
                self._guessed[request] = ranked
            trees.append(tree)
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Count which guesses of this step were right."""
        for seen in observations:
            ranked = self._guessed.pop(seen.request, None)
            if ranked is not None and seen.verdict is not None:
                self.acceptance.record(ranked, seen.verdict.tokens)

    def release(self, request: Request) -> None:
        """Forget a request; what was counted stays."""
        self._guessed.pop(request, None)
