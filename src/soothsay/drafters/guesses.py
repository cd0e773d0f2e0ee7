"""Guesses below a node, by a drafter that has a distribution q: the likeliest, or draws from it.

The verifiers that decide by chance know what q each guess was drawn from. In return the shape of a tree, and
the scores by which it may be cut, must not depend on what was drawn: such trees follow `draw_template`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soothsay.engine.request import Request
from soothsay.engine.sampling import DRAFTING, Keyed, Nodes, perturb
from soothsay.engine.tree import DraftTree, Draws, FloatArray
from soothsay.engine.verify import Chance, Guessing
from soothsay.native import native_kernels

FIRST_DRAW, NEXT_DRAW = 0.5, 0.12
"""How often the first guess that was drawn at a node is accepted, and each further one if none before it was:
round numbers near those that were measured (docs/log.md)."""

SHARPNESS = 2.0
"""What a drafter's log-probabilities of greedy guesses are multiplied by: that a token is the likeliest is
surer than that it would be drawn. Trees that trust their best guesses more are narrower and deeper, and hold
more that is right: measured with MTP, EAGLE, Hydra, the block drafter and a draft model, which all see the
guesses before their own. Medusa's heads do not, and are too sure of deep ones as it is (docs/log.md)."""


def likeliest(logits: Tensor, asked: Sequence[Nodes], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the target emits at each node, by a drafter that knows what stands above.

    Args:
        logits: the drafter's, `[M, V]` float32, the rows of all of `asked` in order. Not changed.
        asked: which nodes the rows belong to.
        count: tokens that are wanted at each; V, where there are fewer.

    Returns:
        `[M, count]` log-probabilities, the best first, and their tokens; `[M, V]` float32, of which they are
        the largest: log q up to a constant, where guesses are drawn.
    """
    scores = perturb(logits, asked)
    factors = [SHARPNESS if n.request.params.temperature == 0 else 1.0 for n in asked for _ in n.indices]
    return *largest(scores, count, torch.tensor(factors, device=scores.device)), scores


def largest(x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, the largest first: `[M, V] -> [M, count]` values and places.

    With `factors`, `[M]` float32 above 0: in place of values the log-softmax of rows times their factors.
    """
    native = native_kernels() if x.device.type == "cpu" else None
    return (stock_largest if native is None else native.largest)(x, count, factors)


def stock_largest(x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`largest` in stock operations."""
    values, places = x.topk(min(count, x.shape[1]), dim=-1)
    if factors is not None:
        values = values * factors[:, None] - (x * factors[:, None]).logsumexp(-1, keepdim=True)
    return values, places


def guess(
    tree: DraftTree,
    parent: int,
    likeliest: tuple[Sequence[float], Sequence[int]],
    ranks: Sequence[int],
    bound: float,
) -> dict[int, int]:
    """Put those of the likeliest tokens that have these ranks, and scores above a bound, below `parent`.

    Args:
        tree: it gets them.
        parent: a node of it.
        likeliest: log-probabilities and tokens, the best first.
        ranks: some may be of tokens that there are not.
        bound: of a node's score.

    Returns:
        The node of each rank that is there.
    """
    log_probs, tokens = likeliest
    bound -= tree.scores[parent]
    there = [rank for rank in ranks if rank < len(tokens) and log_probs[rank] > bound]
    return {rank: tree.add(parent, tokens[rank], log_probs[rank]) for rank in there}


def draw(tree: DraftTree, parent: int, log_q: Tensor, count: int, request: Request) -> dict[int, int]:
    """Put `count` draws below `parent`, made as the request's verifier wants them.

    Args:
        tree: the request's, of this step; it gets them.
        parent: a node of it, below which nothing was drawn yet.
        log_q: `[V]` up to a constant.
        count: less are drawn where fewer tokens are possible.
        request: whose seed and position the draws are keyed by, and no less by the parent.

    Returns:
        The node of each draw by its place, without those that had come before.
    """
    q = log_q.double().softmax(-1).cpu().numpy()
    if not q.sum() > 0:  # a drafter's numbers may be beyond use
        return {}
    replaced = request.params.rule.guessing is Guessing.WITH_REPLACEMENT
    chance = Keyed(request.seed, DRAFTING, len(request.tokens), parent)
    return add_draws(tree, parent, q, draw_tokens(q, count, replaced, chance), replaced)


def draw_tokens(q: FloatArray, count: int, replaced: bool, chance: Chance) -> list[int]:
    """So many tokens from `q`, `[V]`; without replacement, no more than there are above 0."""
    if replaced:
        return [chance.pick(q) for _ in range(count)]
    left, tokens = q.copy(), []
    for _ in range(min(count, int(np.count_nonzero(q)))):
        tokens.append(chance.pick(left))
        left[tokens[-1]] = 0.0
    return tokens


def add_draws(
    tree: DraftTree, parent: int, q: FloatArray, tokens: Sequence[int], replaced: bool
) -> dict[int, int]:
    """Put tokens that were drawn from `q` below `parent`; the node of each new one, by its place."""
    log_probs = [math.log(rate) for rate in draw_rates(len(tokens))]
    tree.draws[parent] = Draws(tuple(tokens), tuple(log_probs), q, replaced)
    nodes: dict[int, int] = {}
    for place, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
        if token not in tokens[:place]:
            nodes[place] = tree.add(parent, token, log_prob)
    return nodes


def draw_rates(count: int) -> list[float]:
    """How often each of a node's draws is accepted, by place."""
    others = [(1 - FIRST_DRAW) * NEXT_DRAW * (1 - NEXT_DRAW) ** place for place in range(count - 1)]
    return [FIRST_DRAW, *others][:count]
