"""Section 4.3 of docs/controller.md: which nodes of a step's drafts are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.control.cost import Prices


class RatedDraft(NamedTuple):
    """A draft, and the probability that each of its nodes is right. The root's is 1."""

    tree: DraftTree
    probabilities: list[float]


def select_nodes(
    drafts: Mapping[Request, Sequence[RatedDraft]], prices: Prices, drafting: float, batch: int
) -> dict[Request, DraftTree]:
    """Select the nodes that give the most tokens per second: those with the highest probabilities.

    Args:
        drafts: of each request that has any.
        prices: have the time of a pass by its number of nodes.
        drafting: seconds that drafting has taken in this step.
        batch: requests of the step. Each gets one token without any draft.

    Returns:
        A tree for each request that has a node to verify. A tree with `draws` is kept whole: cutting it by
        the tokens that were drawn would bias its verifier.
    """
    selected: dict[Request, DraftTree] = {}
    merged: list[tuple[Request, DraftTree]] = []
    nodes: list[tuple[float, int, int]] = []  # minus the probability, index in `merged`, node
    for request, own in drafts.items():
        max_depth = request.max_depth
        drawn = next((draft.tree for draft in own if draft.tree.draws), None)
        if drawn is not None:
            selected[request] = drawn
            continue
        tree, probabilities = _merge_drafts(own)
        index, depths = len(merged), tree.depths
        best = [(-p, index, node) for node, p in enumerate(probabilities) if 0 < depths[node] <= max_depth]
        best.sort()
        nodes += best[: request.max_nodes - 1]
        merged.append((request, tree))
    nodes.sort()
    kept: dict[int, list[int]] = {}
    for _, index, node in nodes[: _best_count(nodes, prices, drafting, batch)]:
        kept.setdefault(index, []).append(node)
    for index, own_nodes in kept.items():
        request, tree = merged[index]
        selected[request] = tree if len(own_nodes) == len(tree) - 1 else tree.subtree(own_nodes)
    return selected


def _best_count(nodes: Sequence[tuple[float, int, int]], prices: Prices, drafting: float, batch: int) -> int:
    """How many of the nodes, the best first, give the most tokens per second."""
    tokens = float(batch)
    best, best_rate = 0, tokens / (drafting + prices.pass_seconds[0])
    for count, (minus_probability, *_) in enumerate(nodes, start=1):
        tokens -= minus_probability
        rate = tokens / (drafting + prices.pass_seconds[count])
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def _merge_drafts(drafts: Sequence[RatedDraft]) -> RatedDraft:
    """One tree with the nodes of all drafts. A node of several drafts has its highest probability."""
    if len(drafts) == 1:
        return drafts[0]
    merged, known = DraftTree(drafts[0].tree.tokens[0]), [1.0]
    for tree, probabilities in drafts:
        merged_node = [0]  # of each node of `tree`
        for node in range(1, len(tree)):
            place = merged.add(merged_node[tree.parents[node]], tree.tokens[node])
            if place == len(known):
                known.append(probabilities[node])
            else:
                known[place] = max(known[place], probabilities[node])
            merged_node.append(place)
    return RatedDraft(merged, known)
