"""Predicts speed-ups from counts and times, and says how many nodes of a tree would have been best.

A step of speculation takes one pass over all nodes of its tree, and time outside of the pass: for drafting,
scheduling and text. It brings the accepted tokens and one more. A step of plain decoding takes a pass of one
row and its time outside, and brings one token. So, with T(rows) the time of a pass,

    speed-up = tokens a step x (T(1) + plain's time outside) / (T(nodes) + time outside)

Leviathan et al. 2023 (arXiv 2211.17192) have this with a constant T and with drafting as the only time
outside. T is measured apart from the run, and gives the proportions of passes. Their scale is that of plain
decoding's passes in the run, since the speed of a machine changes. Times outside are those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from soothsay.core.tree import DraftTree

Number = TypeVar("Number", int, float)

PassTime = Callable[[int, float], float]
"""Seconds of a pass, by its rows and by the tokens before each row."""


@dataclass(slots=True)
class TreeCounts:
    """Counts of draft trees, from which smaller trees can be replayed.

    A tree that is cut to n nodes keeps its root and its n - 1 best-scored nodes (`DraftTree.prune`). A parent
    is never worse than its child, so the nodes that are accepted from a cut tree are the accepted nodes with
    a rank below n. This is exact for each step.

    Example:
        The root, two children, and a grandchild below the worse child. That child and the grandchild are
        accepted. Two nodes would have brought one token, three nodes two, four nodes three.

        >>> tree = DraftTree(7)
        >>> tree.add(0, 1, log_prob=-0.1), tree.add(0, 2, log_prob=-1.0), tree.add(2, 3, log_prob=-1.0)
        (1, 2, 3)
        >>> counts = TreeCounts()
        >>> counts.record(tree, [2, 3])
        >>> counts.sizes, counts.ranks
        ([0, 0, 0, 1], [0, 1, 1])
        >>> [counts.tokens(nodes) for nodes in (1, 2, 3, 4)]
        [1.0, 1.0, 2.0, 3.0]
    """

    sizes: list[float] = field(default_factory=list)  # element i: steps whose tree had i + 1 nodes
    ranks: list[float] = field(default_factory=list)  # element i: steps that accepted the node of rank i + 1

    def record(self, tree: DraftTree, accepted: Sequence[int], steps: float = 1) -> None:
        """Count a step.

        Args:
            tree: what was verified.
            accepted: its accepted nodes, without the root and without those after the answer's end.
            steps: how often the step counts.
        """
        _add(self.sizes, len(tree) - 1, steps)
        if accepted:
            best_first = sorted(range(1, len(tree)), key=lambda node: (-tree.scores[node], node))
            rank = {node: place for place, node in enumerate(best_first)}
            for node in accepted:
                _add(self.ranks, rank[node], steps)

    @property
    def steps(self) -> float:
        """Number of trees."""
        return sum(self.sizes)

    def tokens(self, nodes: int) -> float:
        """Tokens a step, if trees had been cut to `nodes` nodes, the root included."""
        return 1 + sum(self.ranks[: nodes - 1]) / self.steps

    def cut(self, nodes: int) -> Iterator[tuple[int, float]]:
        """Each size that trees have if they are cut to `nodes` nodes, and the share of steps with it."""
        for size, steps in enumerate(self.sizes, start=1):
            if steps:
                yield min(size, nodes), steps / self.steps


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one contender did after the prompts were read.

    With several requests at once, a step is one request's part of a pass.
    """

    passes: float  # forward passes of the target
    verifying: float  # seconds from drafts to verdicts
    outside: float  # all other seconds: drafting, scheduling, text
    context: float  # tokens before the tree, mean over steps
    trees: TreeCounts

    @property
    def at_once(self) -> float:
        """Requests in a pass."""
        return self.trees.steps / self.passes

    @classmethod
    def together(cls, parts: Sequence[Decoding]) -> Decoding:
        """The sum of several, at least one."""
        trees = TreeCounts(
            sizes=added([part.trees.sizes for part in parts]),
            ranks=added([part.trees.ranks for part in parts]),
        )
        return cls(
            passes=sum(part.passes for part in parts),
            verifying=sum(part.verifying for part in parts),
            outside=sum(part.outside for part in parts),
            context=sum(part.context * part.trees.steps for part in parts) / trees.steps,
            trees=trees,
        )


def predicted_seconds(plain: Decoding, drafted: Decoding, time: PassTime, nodes: int | None = None) -> float:
    """Seconds that `drafted` should take, if its trees had at most `nodes` nodes. None: as they were.

    With several requests at once, their trees in a pass are taken to be equally large.
    """
    scale = plain.verifying / plain.passes / time(round(plain.at_once), plain.context)
    sizes = drafted.trees.cut(len(drafted.trees.sizes) if nodes is None else nodes)
    one = sum(share * time(round(drafted.at_once * size), drafted.context) for size, share in sizes)
    return drafted.passes * scale * one + drafted.outside


def speedups_by_nodes(plain: Decoding, drafted: Decoding, time: PassTime) -> list[float]:
    """The speed-up over plain decoding that trees of at most 1, 2, ... nodes should bring.

    The first is 1: a root alone is plain decoding, without a drafter. The others take the time of drafting
    as it was. Drafters that would draft less for a smaller tree would be a little faster than this.
    """
    plain_rate = plain.trees.steps / (plain.verifying + plain.outside)
    rates = (
        drafted.trees.tokens(nodes) * drafted.trees.steps / predicted_seconds(plain, drafted, time, nodes)
        for nodes in range(2, len(drafted.trees.sizes) + 1)
    )
    return [1.0, *(rate / plain_rate for rate in rates)]


def added(lists: Sequence[Sequence[Number]]) -> list[Number]:
    """Add lists element by element; missing elements count as 0.

    Example:
        >>> added([[3, 1], [4]])
        [7, 1]
    """
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _add(counts: list[float], place: int, number: float) -> None:
    counts.extend([0] * (place + 1 - len(counts)))
    counts[place] += number
