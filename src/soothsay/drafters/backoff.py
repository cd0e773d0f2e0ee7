"""Trees of what came next before, counted in contexts that get shorter where the longer ones know little.

A method is a set of contexts: all suffixes of a text that were seen before, whatever their length (`suffix`),
or its last few tokens (`ngram`). How a tree grows from them is the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from soothsay.engine.tree import DraftTree

Context = TypeVar("Context")

WIDEST = 16
"""Tokens that are looked at behind a context, at most: those seen first, among which are the commonest. On
Spec-Bench, 256 give sibyl as many tokens a step, and contexts with many take twice the time."""

LEAST = 0.02
"""A path less likely than this is not worth a row: from sixteen such guesses the target takes one in 40 steps
or fewer."""


class Followers(NamedTuple):
    """What came behind a context."""

    counts: Iterable[tuple[int, int]]
    """Tokens and how often each came; at most `WIDEST`."""

    total: int
    """How often the context occurred."""

    distinct: int
    """How many different tokens came."""

    doubt: float
    """Between 0 and 1: what is taken from each count for tokens that have not come yet."""


class Source(ABC, Generic[Context]):
    """Where contexts are looked up."""

    __slots__ = ()

    @abstractmethod
    def followers(self, context: Context) -> Followers:
        """What came behind `context`."""

    @abstractmethod
    def shorter(self, context: Context) -> Context | None:
        """The next shorter context that may know more; None: there is none."""

    @abstractmethod
    def behind(self, context: Context, token: int) -> Context:
        """The context one token further; `token` is one of its followers."""


def grow(tree: DraftTree, starts: Sequence[tuple[Source[Context], Context]], nodes: int, depth: int) -> None:
    """Add the likeliest paths below a tree's root, the best first.

    In a context that occurred `n` times, with `d` different followers, one that came `c` times has the
    probability `(c - doubt) / n`, and `doubt * d / n` is left for what the next shorter context says:
    absolute discounting (Ney, Essen and Kneser 1994), where the guess of the longest context that has one
    counts. A node's is the product along its path. It never rises downward, so the best-first order of
    SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) finds the likeliest paths of all.

    Args:
        tree: a root alone.
        starts: sources, and what each knows of the committed tokens; of equal guesses, the likelier counts.
        nodes: the tree's, the root included, at most.
        depth: guesses in a row, at most.
    """
    heap = [(-1.0, i, 0, -1, source, context) for i, (source, context) in enumerate(starts)]
    heapify(heap)
    number = len(heap)  # of equal guesses the first come first; contexts need not compare
    expanded: set[tuple[int, Source[Context]]] = set()
    while heap and len(tree) < nodes:
        negative, _, node, token, source, context = heappop(heap)
        if token >= 0:
            node = tree.add(node, token, math.log(-negative) - tree.scores[node])
            if (node, source) in expanded:  # a longer context said so before
                continue
            expanded.add((node, source))
            context = source.behind(context, token)
        if tree.depths[node] >= depth:
            continue
        counts, total, distinct, doubt = source.followers(context)
        if total:
            share = negative / total
            for token, count in counts:
                path = share * (count - doubt)
                if path <= -LEAST:
                    number += 1
                    heappush(heap, (path, number, node, token, source, context))
            negative = share * min(doubt * distinct, total)
        if negative <= -LEAST:
            less = source.shorter(context)
            if less is not None:
                number += 1
                heappush(heap, (negative, number, node, -1, source, less))
