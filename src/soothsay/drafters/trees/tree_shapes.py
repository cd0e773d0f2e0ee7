"""The shapes of trees that grow level by level: which nodes are added, and which are expanded next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from soothsay.drafters.base import Target, check_at_least_one

Ranks = tuple[int, ...]
"""A node, named by the ranks along its path. (0, 2) is the third likeliest token below the likeliest one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that was just added to a tree, and may be expanded next."""

    score: float
    node: int  # in the tree that is verified
    above: int  # its parent, in the tree of expanded nodes
    ranks: Ranks


class TreeShape(Protocol):
    """Decides which nodes a tree gets."""

    depth: int
    """The largest number of levels below the root."""

    branch: int
    """The largest number of tokens that are looked at below one node."""

    max_nodes: int
    """Size of the largest tree, the root included."""

    def ranks(self, node: Ranks) -> Sequence[int]:
        """Return the ranks of the tokens that are added below `node`; 0 is the likeliest token."""

    def explored(self, level: Sequence[Candidate]) -> list[Candidate]:
        """Return the nodes of a level that are expanded, the most important first."""


class ConfidentShape:
    """Expands the likeliest nodes of each level (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

    Example:
        With width 2 and branch 2, the root gets tokens a and b. Both are expanded, each gets two tokens, and
        the two best of the four are expanded next. With width 1 and branch 1, the tree is a chain.

    Args:
        depth: levels below the root.
        width: nodes of each level that are expanded.
        branch: tokens that are added below each expanded node.
    """

    def __init__(self, depth: int, width: int, branch: int):
        self.depth, self.width, self.branch = depth, width, branch
        self.max_nodes = 1 + depth if width == branch == 1 else 1 + branch + (depth - 1) * width * branch

    @classmethod
    def within(
        cls,
        name: str,
        target: Target,
        depth: int,
        width: int | None = None,
        branch: int | None = None,
        most: int | None = None,
    ) -> ConfidentShape:
        """Return the shape for the drafter called `name`, with options that may be left out.

        Args:
            name: the drafter's name, for the error message.
            target: its `max_tree` bounds the default width.
            depth: levels below the root.
            width: None: the largest number for which the tree has room for all levels.
            branch: None: one more than `width`.
            most: the largest default width; None: there is no bound.

        Raises:
            DrafterError: a number is below 1.
        """
        if width is None:
            room = (target.config.max_tree - 1) // max(depth - 1, 1)
            width = max(room if most is None else min(room, most), 1)
        branch = width + 1 if branch is None else branch
        check_at_least_one(name, depth=depth, width=width, branch=branch)
        return cls(depth, width, branch)

    def ranks(self, node: Ranks) -> Sequence[int]:
        """Return the first `branch` ranks, for every node."""
        return range(self.branch)

    def explored(self, level: Sequence[Candidate]) -> list[Candidate]:
        """Return the `width` nodes with the best scores."""
        return sorted(level, key=lambda candidate: -candidate.score)[: self.width]


class TemplateShape:
    """Adds the same nodes in every step, named by their ranks.

    Args:
        template: a path of ranks for each node. Every prefix of a path must be in it too.
    """

    def __init__(self, template: Sequence[Sequence[int]]):
        self._below: dict[Ranks, list[int]] = {}
        for *above, rank in template:
            self._below.setdefault(tuple(above), []).append(rank)
        self.depth = max(len(path) for path in template)
        self.branch = 1 + max(max(path) for path in template)
        self.max_nodes = 1 + len(template)

    def ranks(self, node: Ranks) -> Sequence[int]:
        """Return the ranks that the template has below `node`."""
        return self._below.get(node, ())

    def explored(self, level: Sequence[Candidate]) -> list[Candidate]:
        """Return the nodes that have something below them in the template, the best scores first."""
        inner = [candidate for candidate in level if candidate.ranks in self._below]
        return sorted(inner, key=lambda candidate: -candidate.score)
