"""Which guesses are verified: of all that were found for a step, those that make it the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soothsay.drafters.outlook import Market
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree

Found = tuple[DraftTree, list[float]]
"""Guesses, and the probability of each node."""


def worth_verifying(
    found: Mapping[Request, Sequence[Found]], market: Market, spent: float, sure: float
) -> dict[Request, DraftTree]:
    """Of all guesses, the likeliest; so many that tokens per second are most.

    Args:
        found: the trees for each request, at least one.
        market: what passes take.
        spent: seconds that guessing has taken.
        sure: tokens that the step brings without any guess.

    Returns:
        A tree for each request that has a node to verify. One that was drawn is kept whole: to cut it by what
        was drawn would bias its verifier.
    """
    whole: dict[Request, DraftTree] = {}
    merged: list[tuple[Request, DraftTree]] = []
    nodes: list[tuple[float, int, int]] = []  # minus probability, number among those merged, node
    for request, guesses in found.items():
        drawn = next((tree for tree, _ in guesses if tree.draws), None)
        if drawn is not None:
            whole[request] = drawn
            continue
        tree, probabilities = _merge(guesses)
        own = sorted((-p, len(merged), node) for node, p in enumerate(probabilities) if node)
        nodes += [one for one in own if tree.depths[one[2]] <= request.max_depth][: request.max_nodes - 1]
        merged.append((request, tree))
    nodes.sort()
    keep, most = 0, sure / (spent + market.passes[0])
    for count, (minus, *_) in enumerate(nodes, start=1):
        sure -= minus
        rate = sure / (spent + market.passes[count])
        if rate > most:
            most, keep = rate, count
    chosen: dict[int, list[int]] = {}
    for _, number, node in nodes[:keep]:
        chosen.setdefault(number, []).append(node)
    for number, kept in chosen.items():
        request, tree = merged[number]
        whole[request] = tree if len(kept) == len(tree) - 1 else tree.only(kept)
    return whole


def _merge(guesses: Sequence[Found]) -> Found:
    """One tree of all guesses, with the probability of each node."""
    if len(guesses) == 1:
        return guesses[0]
    merged, known = DraftTree(guesses[0][0].tokens[0]), [1.0]
    for tree, probabilities in guesses:
        place = [0]
        for node in range(1, len(tree)):
            at = merged.add(place[tree.parents[node]], tree.tokens[node])
            if at == len(known):
                known.append(probabilities[node])
            else:
                known[at] = max(known[at], probabilities[node])
            place.append(at)
    return merged, known
