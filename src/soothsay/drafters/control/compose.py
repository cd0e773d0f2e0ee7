"""Several drafters as one: `a > b` and `a + b`.

A cascade asks the second drafter where the first has found little, as SAM-Decoding does with EAGLE (Hu et
al. 2024, arXiv 2411.10666). A merger puts the drafts of all into one tree (SpecInfer, Miao et al. 2023,
arXiv 2305.09781). Each step still has one tree and one verification.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from soothsay.core.request import Observation, Request
from soothsay.core.tenant import PerTenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, MisfitWatch, RememberingDrafter, Target
from soothsay.drafters.control.acceptance import AcceptanceCalibration, right_nodes

CASCADE_WEIGHT = 1 / 32
"""Weight of the newest step in a cascade's running mean of accepted nodes."""


class Composite(Drafter):
    """Base class of drafters that are made of others. Passes on what the engine shows.

    Args:
        target: the model to draft for.
        parts: the drafters, at least one.
    """

    def __init__(self, target: Target, parts: Sequence[Drafter]):
        self.target, self.parts = target, tuple(parts)
        self.taps = tuple(tap for part in parts for tap in part.taps)
        self.max_nodes = 1 + sum(part.max_nodes - 1 for part in parts)
        ends = [sum(len(part.taps) for part in parts[: i + 1]) for i in range(len(parts))]
        self._taps = [slice(end - len(part.taps), end) for part, end in zip(parts, ends, strict=True)]
        self._watches = [MisfitWatch(part.name) if part.trained else None for part in parts]
        # this step's trees: request -> index of the part -> its tree, in the order in which parts were asked
        self._trees: defaultdict[Request, dict[int, DraftTree]] = defaultdict(dict)

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]:
        """The part that proposed each node. If several did, the first of `_proposed` counts."""
        names: dict[int, str] = {}
        for index, own in self._proposed(request):
            places = tree.places_in(own, nodes)
            found = self.parts[index].authors(request, own, [*places.values()])
            names = dict(zip(places, found, strict=True)) | names
            if len(names) == len(nodes):
                break
        return [names.get(node, self.name) for node in nodes]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Show each part what it would see on its own."""
        for index, part in enumerate(self.parts):
            part.observe([self._seen_by(index, seen) for seen in observations])
            self._watch(index, observations)
        self._trees.clear()

    def finish_loading(self) -> None:
        """Wait for all parts."""
        for part in self.parts:
            part.finish_loading()

    def num_known(self, request: Request, blocks: Sequence[int]) -> int:
        """The blocks that every part can go on after."""
        return min(part.num_known(request, blocks) for part in self.parts)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._trees.pop(request, None)
        for part in self.parts:
            part.release(request)

    def reset(self) -> None:
        """Forget what was learned from other requests."""
        for part in self.parts:
            part.reset()

    def study(self) -> bool:
        """Let each part learn from what waits."""
        return sum(part.study() for part in self.parts) > 0

    def learned(self) -> Sequence[RememberingDrafter[Any]]:
        """What all parts have learned."""
        return [learned for part in self.parts for learned in part.learned()]

    def _ask(self, index: int, requests: Sequence[Request]) -> list[DraftTree]:
        """The trees of one part. They are kept until the step is observed."""
        trees = self.parts[index].propose(requests) if requests else []
        for request, tree in zip(requests, trees, strict=True):
            self._trees[request][index] = tree
        return trees

    def _proposed(self, request: Request) -> Iterable[tuple[int, DraftTree]]:
        """Indices and trees of the parts that were asked, those first that `authors` prefers."""
        return self._trees[request].items()

    def _seen_by(self, index: int, seen: Observation) -> Observation:
        """An observation with the taps of one part."""
        own = seen.taps[self._taps[index]]
        return seen if len(own) == len(seen.taps) else replace(seen, taps=own)

    def _watch(self, index: int, observations: Sequence[Observation]) -> None:
        """Count the steps of a trained part, so that one that never drafts right is reported."""
        watch = self._watches[index]
        if watch is None:
            return
        part = self.parts[index]
        for seen in observations:
            tree, request = self._trees[seen.request].get(index), seen.request
            if request.num_prefix_hits and not part.num_known(request, request.blocks[:1]):
                continue  # it drafts without the beginning of the text, and is not to blame
            if tree is not None and len(tree) > 1 and seen.verdict is not None:
                watch.record(len(tree.walk(seen.verdict.tokens)) - 1)


class Merged(Composite):
    """`a + b`: the drafts of all parts in one trie. If it is too large, the best-scored nodes stay."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The merged trees."""
        trees = [self._ask(index, requests) for index in range(len(self.parts))]
        return [merge_trees(own) for own in zip(*trees, strict=True)]


@dataclass(slots=True)
class DraftQuality:
    """How good the drafts of one part were."""

    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    accepted: float = 1.0  # running mean of right nodes per draft


class Cascade(Composite):
    """`a > b`: asks the next part where the draft before it is expected to be worse than the next one's mean.

    A draft is expected to have the sum of its nodes' calibrated probabilities accepted.
    """

    def __init__(self, target: Target, parts: Sequence[Drafter]):
        super().__init__(target, parts)
        self.max_nodes = max(part.max_nodes for part in parts)
        self._forget_quality()

    def reset(self) -> None:
        """Forget other requests, and how good the parts were for them."""
        super().reset()
        self._forget_quality()

    def _forget_quality(self) -> None:
        self._qualities = PerTenant(lambda: [DraftQuality() for _ in self.parts])

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """For each request, the tree of the first part that is good enough."""
        trees: dict[Request, DraftTree] = {}
        open_ = list(requests)
        for index in range(len(self.parts)):
            trees.update(zip(open_, self._ask(index, open_), strict=True))
            for request in open_:
                # the tree's tokens decide whether it is used, so they are no fair draw any more
                trees[request].draws.clear()
            open_ = [request for request in open_ if self._asks_next(index, request, trees[request])]
        return [trees[request] for request in requests]

    def _asks_next(self, index: int, request: Request, tree: DraftTree) -> bool:
        """Whether a later part is expected to draft better than part `index` did."""
        own, *later = self._qualities[request.tenant][index:]
        bar = max((part.accepted for part in later), default=0.0)
        return sum(own.calibration.probabilities(tree)) - 1 < bar

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn how good the parts are."""
        for seen in observations:
            for index, quality in enumerate(self._qualities[seen.request.tenant]):
                tree = self._trees[seen.request].get(index)
                if tree is None or seen.verdict is None:
                    continue
                accepted = len(tree.walk(seen.verdict.tokens)) - 1
                quality.accepted += (accepted - quality.accepted) * CASCADE_WEIGHT
                right = right_nodes(tree, seen.verdict.tokens)
                if right is not None:
                    quality.calibration.record(tree, right)
        super().observe(observations)

    def _proposed(self, request: Request) -> Iterable[tuple[int, DraftTree]]:
        """The part that was asked last comes first: its tree is the one that is verified."""
        return reversed(self._trees[request].items())


def merge_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """One trie with the nodes of all trees. A node of several trees keeps its best score."""
    merged = DraftTree(trees[0].tokens[0])
    for tree in trees:
        merged.include(tree)
    return merged
