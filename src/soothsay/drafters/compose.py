"""Several drafters as one.

A cascade asks the second drafter where the first has found little, as SAM-Decoding does with EAGLE (Hu et
al. 2024, arXiv 2411.10666). A merger puts the guesses of all into one tree (SpecInfer, Miao et al. 2023,
arXiv 2305.09781). Either way there is one tree and one verification.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from soothsay.drafters.base import Drafter, Observation, Target
from soothsay.engine.calibration import Calibration, settle
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.engine.watch import Watch


class Composite(Drafter):
    """Shares what the engine shows among its parts.

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
        self._watches = [Watch() if part.trained else None for part in parts]
        # of this step: what each part has proposed, by its number, in the order in which they were asked
        self._trees: defaultdict[Request, dict[int, DraftTree]] = defaultdict(dict)

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]:
        """The part that each node is from; where several had the same guess, the one that was asked first."""
        names: dict[int, str] = {}
        for index, own in self._proposed(request):
            places = _places(nodes, tree, own)
            found = self.parts[index].authors(request, own, [*places.values()])
            names = dict(zip(places, found, strict=True)) | names
            if len(names) == len(nodes):
                break
        return [names.get(node, self.name) for node in nodes]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Show each part what it would see by itself."""
        for index, part in enumerate(self.parts):
            part.observe([self._seen_by(index, seen) for seen in observations])
            self._watch(index, observations)
        self._trees.clear()

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._trees.pop(request, None)
        for part in self.parts:
            part.release(request)

    def reset(self) -> None:
        """Forget what was learnt from other requests."""
        for part in self.parts:
            part.reset()

    def _ask(self, index: int, requests: Sequence[Request]) -> list[DraftTree]:
        """Trees of one part, noted until the step has been observed."""
        trees = self.parts[index].propose(requests) if requests else []
        for request, tree in zip(requests, trees, strict=True):
            self._trees[request][index] = tree
        return trees

    def _proposed(self, request: Request) -> Iterable[tuple[int, DraftTree]]:
        """Numbers and trees of the parts that were asked; what several have guessed is the first one's."""
        return self._trees[request].items()

    def _seen_by(self, index: int, seen: Observation) -> Observation:
        return replace(seen, taps=seen.taps[self._taps[index]])

    def _watch(self, index: int, observations: Sequence[Observation]) -> None:
        watch = self._watches[index]
        if watch is None:
            return
        for seen in observations:
            tree = self._trees[seen.request].get(index)
            if tree is not None and len(tree) > 1 and seen.verdict is not None:
                watch.see(self.parts[index], len(tree.walk(seen.verdict.tokens)) - 1)


class Merged(Composite):
    """`a + b`: the guesses of all parts in one trie; where there are too many, the best-scored stay."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The merged trees."""
        trees = [self._ask(index, requests) for index in range(len(self.parts))]
        return [merge(own) for own in zip(*trees, strict=True)]


class Cascade(Composite):
    """`a > b`: the next part is asked where the one before it is expected to do worse than the next one has
    done of late.

    What a part is expected to do is the sum of its nodes' probabilities, by how often its guesses of such
    scores have been right.
    """

    def __init__(self, target: Target, parts: Sequence[Drafter]):
        super().__init__(target, parts)
        self.max_nodes = max(part.max_nodes for part in parts)
        self._forget()

    def reset(self) -> None:
        """Forget other requests, and how good the parts were for them."""
        super().reset()
        self._forget()

    def _forget(self) -> None:
        self._calibrations = [Calibration() for _ in self.parts]
        self._accepted = [1.0 for _ in self.parts]  # guesses right a step, of late

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The tree of the first part that is good enough."""
        trees: dict[Request, DraftTree] = {}
        open_ = list(requests)
        for index, calibration in enumerate(self._calibrations):
            trees.update(zip(open_, self._ask(index, open_), strict=True))
            for request in open_:  # a tree that is chosen by what was drawn is no fair draw any more
                trees[request].draws.clear()
            bar = max(self._accepted[index + 1 :], default=0.0)
            open_ = [r for r in open_ if sum(calibration.probabilities(trees[r])) - 1 < bar]
        return [trees[request] for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn how good the parts are."""
        for seen in observations:
            for index, calibration in enumerate(self._calibrations):
                tree = self._trees[seen.request].get(index)
                if tree is None or seen.verdict is None:
                    continue
                right = tree.walk(seen.verdict.tokens)[1:]
                self._accepted[index] += (len(right) - self._accepted[index]) / 32
                settled = settle(tree, seen.verdict.tokens)
                if settled is not None:
                    calibration.record(tree, set(settled))
        super().observe(observations)

    def _proposed(self, request: Request) -> Iterable[tuple[int, DraftTree]]:
        """The part that was asked last comes first: its tree is the one."""
        return reversed(self._trees[request].items())


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """One trie of all guesses; a node that several trees have keeps its best score."""
    merged = DraftTree(trees[0].tokens[0])
    for tree in trees:
        place = [0]
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            log_prob = tree.scores[node] - tree.scores[parent]
            place.append(merged.add(place[parent], tree.tokens[node], log_prob))
    return merged


def _places(nodes: Sequence[int], tree: DraftTree, other: DraftTree) -> dict[int, int]:
    """Where the same guesses stand in another tree, of those nodes that it has; `nodes` as in `authors`."""
    places = {0: 0}
    for node in nodes:
        above = places.get(tree.parents[node])
        place = None if above is None else other.children[above].get(tree.tokens[node])
        if place is not None:
            places[node] = place
    del places[0]
    return places
