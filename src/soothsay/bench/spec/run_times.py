"""What a contender of `soothsay bench spec` took: times, and counts of steps and trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from soothsay.core.answer import StepTrace
from soothsay.core.tree import DraftTree

Number = TypeVar("Number", int, float)


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

    def record(self, tree: DraftTree | StepTrace, accepted: Sequence[int], steps: float = 1) -> None:
        """Count a step.

        Args:
            tree: what was verified.
            accepted: its accepted nodes, without the root and without those after the answer's end.
            steps: how often the step counts.
        """
        _add(self.sizes, len(tree.scores) - 1, steps)
        if accepted:
            best_first = sorted(range(1, len(tree.scores)), key=lambda node: (-tree.scores[node], node))
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
class RunTimes:
    """Times and counts of one contender that answered some turns in one batch, or sums of several.

    Times are in seconds.
    """

    answers: int
    different: int | None  # answers that are not plain decoding's: must be 0. None: not comparable
    tokens: int  # raw token ids, up to the end token
    seconds: float  # until the last answer ended
    prefill: float  # until each answer had its first token
    ahead: int  # tokens emitted by then
    cpu: float = 0.0  # CPU time of the engine's thread
    draft: float = 0.0  # in the drafter, after prefill
    verify: float = 0.0  # from drafts to verdicts, after prefill
    steps: int = 0  # forward passes that emitted tokens, summed over answers
    first: int = 0  # tokens that the first steps emitted, summed over answers
    drafted: int = 0  # tree nodes verified, without roots
    # element i: steps that accepted a node at depth i + 1
    accepted_at: list[int] = field(default_factory=list)
    # after prefill, for predictions; empty and 0 if unknown
    passes: int = 0
    context: float = 0.0  # tokens before the tree, mean over steps
    tree_sizes: list[float] = field(default_factory=list)  # see `TreeCounts`
    accepted_ranks: list[float] = field(default_factory=list)  # see `TreeCounts`
    # if trees are kept: each tree after prefill, a `StepTrace` with `answer`, `said` and `accepted`
    trees: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def total(cls, runs: Sequence[RunTimes]) -> RunTimes:
        """The sums over runs, without their `trees`. The context is the mean over all steps."""
        compared = [run.different for run in runs if run.different is not None]
        read = sum(run.context * run.counts.steps for run in runs)
        sums: dict[str, Any] = {name: sum(getattr(run, name) for run in runs) for name in SUMS}
        sums |= {name: added([getattr(run, name) for run in runs]) for name in LISTS}
        context = ratio(read, sum(sums["tree_sizes"]))
        return cls(different=sum(compared) if compared else None, context=context, **sums)

    @property
    def counts(self) -> TreeCounts:
        """The counts of trees."""
        return TreeCounts(self.tree_sizes, self.accepted_ranks)

    @property
    def at_once(self) -> float:
        """Requests in a pass. With several, a step is one request's part of a pass."""
        return self.counts.steps / self.passes

    @property
    def outside(self) -> float:
        """Time outside of passes after prefill: drafting, scheduling, text."""
        return max(self.seconds - self.prefill - self.verify, 0.0)

    @property
    def other(self) -> float:
        """Time of scheduling, text and everything else after prefill."""
        return max(self.outside - self.draft, 0.0)

    def rate(self) -> float:
        """Tokens a second."""
        return ratio(self.tokens, self.seconds)

    def decode_rate(self) -> float:
        """Tokens a second after the first token; 0 if there are none."""
        return ratio(self.tokens - self.ahead, self.seconds - self.prefill)

    def cpu_rate(self) -> float:
        """Tokens a second of CPU time."""
        return ratio(self.tokens, self.cpu)


SUMS = (
    *("answers", "tokens", "seconds", "prefill", "ahead", "cpu", "draft", "verify"),
    *("steps", "first", "drafted", "passes"),
)
LISTS = ("accepted_at", "tree_sizes", "accepted_ranks")
"""Fields of `RunTimes` that are added up, and those that are added element by element."""


def ratio(one: float, other: float) -> float:
    """The ratio of two numbers; 0 if the second is 0."""
    return one / other if other else 0.0


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
