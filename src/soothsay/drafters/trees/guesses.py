"""Children of a node from a drafter's distribution q: the likeliest tokens, or draws from q.

Verifiers that decide at random need the q of each draw. Then a tree's shape and scores must not depend on the
drawn tokens: these trees follow `draw_template`.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from soothsay.core.arrays import FloatArray
from soothsay.core.request import Request
from soothsay.core.sampling import DRAFTING, Keyed, Nodes, perturb
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.transfer import send
from soothsay.core.tree import DraftTree, Draws
from soothsay.core.verify import Chance, Guessing

LikelyTokens = tuple[Sequence[float], Sequence[int]]
"""Log-probabilities and tokens, the best first."""

FIRST_DRAW, NEXT_DRAW = 0.5, 0.12
"""Acceptance rates of draws: of the first at a node, and of each later one if all before it were rejected.
Rounded measurements (docs/log.md)."""

SHARPNESS = 2.0
"""Factor of log-probabilities at temperature 0, where the likeliest token is emitted more often than it would
be drawn. It makes trees narrower and deeper, and raises acceptance. Measured with MTP, EAGLE, Hydra, the
block drafter and a draft model, whose distributions depend on the draft tokens before. Medusa's heads do not
use it: they do not see those tokens and overrate deep ones (docs/log.md)."""


def likeliest(
    logits: Tensor, asked: Sequence[Nodes], count: int, ops: SamplingOps
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens after each node, by a drafter that sees the path to it.

    Args:
        logits: the drafter's, `[M, V]` float32, the rows of all of `asked` in order. Not changed.
        asked: the nodes of the rows.
        count: number of tokens for each; at most V are returned.
        ops: of the device of `logits`.

    Returns:
        `[M, count]` log-probabilities, the best first, and their tokens; and the `[M, V]` float32 scores of
        all tokens, which are log q up to a constant where tokens are drawn.
    """
    scores = perturb(logits, asked, ops)
    factors = [SHARPNESS if n.request.params.temperature == 0 else 1.0 for n in asked for _ in n.indices]
    return *ops.largest(scores, count, send(factors, scores.device)), scores


def guess(
    tree: DraftTree, parent: int, likeliest: LikelyTokens, ranks: Sequence[int], bound: float
) -> dict[int, int]:
    """Add the likeliest tokens of some ranks below `parent`, if their scores are above a bound.

    Args:
        tree: is changed.
        parent: a node of it.
        likeliest: log-probabilities and tokens, the best first.
        ranks: of the tokens to add. Ranks without a token are ignored.
        bound: a node's score must be above it.

    Returns:
        The node of each rank that was added.
    """
    log_probs, tokens = likeliest
    bound -= tree.scores[parent]
    there = [rank for rank in ranks if rank < len(tokens) and log_probs[rank] > bound]
    return {rank: tree.add(parent, tokens[rank], log_probs[rank]) for rank in there}


def draw(tree: DraftTree, parent: int, log_q: Tensor, count: int, request: Request) -> dict[int, int]:
    """Add `count` draws below `parent`, with or without replacement, as the request's verifier needs.

    Args:
        tree: the request's tree of this step; is changed.
        parent: a node of it without draws.
        log_q: `[V]` up to a constant.
        count: maximum number of draws; without replacement at most the number of possible tokens.
        request: draws are keyed by its seed and position, and by `parent`.

    Returns:
        The node of each draw by its place, without repeated draws.
    """
    q = log_q.double().softmax(-1).cpu().numpy()
    if not q.sum() > 0:  # a drafter may return NaN
        return {}
    replaced = request.params.rule.guessing is Guessing.WITH_REPLACEMENT
    chance = Keyed(request.seed, DRAFTING, request.length, parent)
    return add_draws(tree, parent, q, draw_tokens(q, count, replaced, chance), replaced)


def draw_tokens(q: FloatArray, count: int, replaced: bool, chance: Chance) -> list[int]:
    """`count` tokens from `q`, `[V]`; without replacement, at most the number of tokens above 0."""
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
    """Add tokens drawn from `q` below `parent`. Returns the node of each by its place, without repeats."""
    log_probs = [math.log(rate) for rate in draw_rates(len(tokens))]
    tree.draws[parent] = Draws(tuple(tokens), tuple(log_probs), q, replaced)
    nodes: dict[int, int] = {}
    for place, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
        if token not in tokens[:place]:
            nodes[place] = tree.add(parent, token, log_prob)
    return nodes


def draw_rates(count: int) -> list[float]:
    """Acceptance rates of a node's draws, by place."""
    others = [(1 - FIRST_DRAW) * NEXT_DRAW * (1 - NEXT_DRAW) ** place for place in range(count - 1)]
    return [FIRST_DRAW, *others][:count]
