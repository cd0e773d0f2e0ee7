"""Trees of the likeliest continuations, counted in contexts, with backoff to shorter contexts.

A method differs in its contexts: all earlier seen suffixes of a text, of any length (`suffix`), or its last
few tokens (`ngram`). The growth of a tree is the same.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from soothsay.core.noise import exponential, noise_key
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing

Context = TypeVar("Context")

WIDEST = 16
"""Maximum number of followers of a context to consider: those seen first, which include the most frequent. On
Spec-Bench, 256 followers give sibyl the same tokens a step, and contexts with many take twice the time."""

LEAST = 0.02
"""Minimum probability of a path. A less likely path is not worth its row: with sixteen of them, the target
accepts one in 40 steps or fewer."""

NOISE_ODDS, NOISE_WEIGHT = 2.5, 0.4
"""`KnownNoise` at temperature 1 and above. With these numbers, estimated and measured acceptance agree in
sampled answers of SmolLM2. With a weight of 1, rare tokens that have great noise are believed far too
often."""


class KnownNoise(NamedTuple):
    """The noise of the draws that a tree guesses. It says which guess will win.

    Attributes:
        seed: of the request.
        first: position of the first of these tokens.
        odds: against a guess whose noise is 0, in units of what its share of the counts says.
        weight: how much the noise counts: 1 if the share were the target's probability, 0 if the share said
            nothing about it.
    """

    seed: int
    first: int
    odds: float
    weight: float

    def probability(self, share: float, level: int, token: int) -> float:
        """How likely the target is to draw a token that has this share of the counts, below 1."""
        wait = exponential(noise_key(self.seed, self.first + level), token)
        against = self.odds * math.pow(wait, self.weight)
        return share / (share + (1.0 - share) * against)


class Followers(NamedTuple):
    """Counts of the tokens that followed a context."""

    counts: Iterable[tuple[int, int]]
    """Tokens and their counts; at most `WIDEST` tokens."""

    total: int
    """Number of occurrences of the context."""

    distinct: int
    """Number of distinct followers."""

    doubt: float
    """Discount of each count in favour of unseen tokens, between 0 and 1."""


class Source(ABC, Generic[Context]):
    """A store in which contexts are looked up."""

    __slots__ = ()

    @abstractmethod
    def followers(self, context: Context) -> Followers:
        """The followers of `context`."""

    @abstractmethod
    def shorter(self, context: Context) -> Context | None:
        """The next shorter context with more occurrences; None if there is none."""

    @abstractmethod
    def after(self, context: Context, token: int) -> Context:
        """The context with `token`, one of its followers, appended."""


def known_noise(request: Request) -> KnownNoise | None:
    """The noise of the next tokens of a request; None if they are greedy, or their noise is unknown.

    Below temperature 1 noise decides less, and both numbers move towards what the counts say.
    """
    params = request.params
    if params.temperature == 0 or params.rule.guessing is not Guessing.SHARED_NOISE:
        return None
    share = min(params.temperature, 1.0)
    return KnownNoise(request.seed, request.length, NOISE_ODDS**share, NOISE_WEIGHT * share)


def grow_continuations(
    tree: DraftTree,
    starts: Sequence[tuple[Source[Context], Context]],
    nodes: int,
    depth: int,
    noise: KnownNoise | None = None,
) -> None:
    """Add the likeliest paths below a tree's root, the best first.

    In a context with `n` occurrences and `d` distinct followers, a follower with count `c` has probability
    `(c - doubt) / n`. The next shorter context shares the remaining `doubt * d / n`. This is absolute
    discounting (Ney, Essen and Kneser 1994), except that a token's probability comes from the longest context
    that has it. The probability of a node is the product along its path and never rises downward. So the
    best-first order of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) finds the likeliest paths.

    Args:
        tree: has only its root.
        starts: sources, each with its context of the committed tokens. A token of several sources has the
            highest of its probabilities.
        nodes: maximum size of the tree, the root included.
        depth: maximum depth of the tree.
        noise: of the tokens. With it, `noise.probability` turns a follower's share into its probability:
            drafter and target know the same Gumbel noise (Daliri et al. 2024, arXiv 2408.07978).
    """
    heap = [(-1.0, i, 0, -1, source, context, 1.0, 1.0) for i, (source, context) in enumerate(starts)]
    heapify(heap)
    number = len(heap)  # breaks ties, so that contexts are never compared
    expanded: set[tuple[int, Source[Context]]] = set()
    while heap and len(tree) < nodes:
        negative, _, node, token, source, context, path, mass = heappop(heap)
        if token >= 0:
            node = tree.add(node, token, math.log(-negative) - tree.scores[node])
            if (node, source) in expanded:  # a longer context added it
                continue
            expanded.add((node, source))
            context = source.after(context, token)
            path, mass = -negative, 1.0
        if tree.depths[node] >= depth:
            continue
        counts, total, distinct, doubt = source.followers(context)
        if total:
            share = mass / total
            for token, count in counts:
                own = share * (count - doubt)
                if noise is not None:
                    own = noise.probability(own, tree.depths[node], token)
                if path * own >= LEAST:
                    number += 1
                    heappush(heap, (-(path * own), number, node, token, source, context, path, mass))
            mass = share * min(doubt * distinct, total)
        if path * mass >= LEAST:
            less = source.shorter(context)
            if less is not None:
                number += 1
                most = path * (mass if noise is None else 1.0)  # of its followers
                heappush(heap, (-most, number, node, -1, source, less, path, mass))
