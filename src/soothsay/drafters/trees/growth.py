"""Grows token trees level by level: draft models, EAGLE, MTP and others use it.

The trees of all requests grow together. A `TreeShape` says which nodes are added, and which are expanded
next. `TreeGrower` owns the shape and the loop over levels. An `Expander`, which is the drafter, computes the
logits below nodes. Draft tokens are chosen with the target's own noise: at temperature above 0 the drafter
proposes the token that the target would draw if both models agreed (Daliri et al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.transfer import download, send
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import LevelwiseDrafter, Target, check_at_least_one
from soothsay.drafters.trees.guesses import draw, guess, likeliest
from soothsay.drafters.trees.templates import draw_template

Ranks = tuple[int, ...]
"""A node, named by the ranks along its path. (0, 2) is the third likeliest token below the likeliest one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that was just added to a tree, and may be expanded next."""

    score: float
    node: int  # in the tree that is verified
    above: int  # its parent, in the tree of expanded nodes
    ranks: Ranks


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


NodeStates = TypeVar("NodeStates")


TreeShape = ConfidentShape | TemplateShape
"""Decides which nodes a tree gets. `depth` is the largest number of levels below the root, `branch` that of
tokens that are looked at below a node, and `max_nodes` that of nodes, the root included."""


@dataclass(slots=True, eq=False)
class GrowingTree:
    """One request's tree while it grows.

    `tree` has all nodes, and is what the target verifies. `expanded` has only the nodes whose logits the
    drafter computes, in the order of their KV slots. A level, with branch 2 and width 1:

        before:  tree      root(a, b)             frontier: a, which is node 1 of `expanded`
                 expanded  root(a)
        after:   tree      root(a(c, d), b)       frontier: d, which is node 2 of `expanded`
                 expanded  root(a(d))
    """

    request: Request
    tree: DraftTree
    shape: TreeShape
    expanded: DraftTree
    frontier: range = range(1)  # nodes of `expanded` to compute next; they are always its last nodes
    parents: list[int] = field(default_factory=list)
    """For each node of the frontier, its parent's row in the last level. Rows count over all requests."""

    node_of: list[int] = field(default_factory=lambda: [0])  # node of `expanded` -> node of `tree`
    ranks_of: list[Ranks] = field(default_factory=lambda: [()])  # node of `expanded` -> its ranks

    @property
    def is_drawn(self) -> bool:
        """Whether draft tokens are drawn at random. Then the shape of the tree must not depend on them."""
        return self.request.params.rule.guessing.draws

    @property
    def frontier_tokens(self) -> list[int]:
        """The tokens of the frontier's nodes."""
        return self.expanded.tokens[self.frontier.start :]

    def frontier_rows(self, first_key: int = 0) -> Rows:
        """Return the frontier as rows of a pass. They do not see keys at offsets below `first_key`."""
        r = self.request
        first = self.frontier.start
        own = _NO_TOKENS, len(r.tokens), r.table, self.expanded, first, first_key
        return Rows(*own, r.state, source=r.num_source)

    def add_level(self, best: Sequence[tuple[list[float], list[int]]], log_q: Tensor) -> list[Candidate]:
        """Add nodes below the frontier.

        Args:
            best: for each node of the frontier, log-probabilities of the likeliest tokens, and the tokens.
            log_q: `[M, V]` log-probabilities up to a constant, for each node of the frontier.

        Returns:
            The new nodes.
        """
        added: list[Candidate] = []
        bound = -math.inf if self.is_drawn else self._bound()
        for row, above in enumerate(self.frontier):
            parent, above_ranks = self.node_of[above], self.ranks_of[above]
            ranks = self.shape.ranks(above_ranks)
            if self.is_drawn:
                nodes = draw(self.tree, parent, log_q[row], len(ranks), self.request)
            else:
                nodes = guess(self.tree, parent, best[row], ranks, bound)
            scores = self.tree.scores
            added += [Candidate(scores[node], node, above, (*above_ranks, r)) for r, node in nodes.items()]
        return added

    def choose(self, added: Sequence[Candidate], least: float) -> list[Candidate]:
        """Return the nodes to expand next; none if together they are right less often than `least`."""
        room = max(self.request.max_nodes - len(self.expanded), 0)
        chosen = self.shape.explored(added)[:room]
        if self.is_drawn:
            return chosen
        bound = self._bound()
        chosen = [new for new in chosen if new.score > bound]
        return chosen if sum(math.exp(new.score) for new in chosen) >= least else []

    def advance(self, chosen: Sequence[Candidate], first_row: int) -> None:
        """Make the chosen nodes the frontier, except those whose token ends the answer.

        `first_row` is the row of the last level that the old frontier begins at.
        """
        begin, end_tokens = len(self.expanded), self.request.end_tokens
        kept = [new for new in chosen if self.tree.tokens[new.node] not in end_tokens]
        for new in kept:
            self.expanded.add(new.above, self.tree.tokens[new.node])
            self.node_of.append(new.node)
            self.ranks_of.append(new.ranks)
        self.parents = [first_row + new.above - self.frontier.start for new in kept]
        self.frontier = range(begin, len(self.expanded))

    def _bound(self) -> float:
        """Return the score that a node must exceed to be verified: `max_nodes` others score at least this.

        A node never scores higher than its parent, so a node below the bound has nothing useful below it.
        """
        scores, count = self.tree.scores, self.request.max_nodes
        return sorted(scores)[-count] if len(scores) >= count else -math.inf


class Expander(Protocol[NodeStates]):
    """Computes the logits below nodes: all that `TreeGrower` needs to know of a drafter.

    `NodeStates` is whatever the drafter keeps of a level's nodes to compute the next level. The grower hands
    it back and does not look into it. Rows are the frontiers of all trees, one after the other.
    """

    def ready(self, request: Request) -> bool:
        """Return whether anything can be drafted for the request now."""

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, NodeStates]:
        """Compute committed tokens that the drafter has not computed yet, up to the roots.

        Returns:
            `[R, V]` float32 logits below the roots, in the target's vocabulary; minus infinity for tokens
            that the drafter cannot produce. And the states of the roots.
        """

    def expand_nodes(self, growing: Sequence[GrowingTree], states: NodeStates) -> tuple[Tensor, NodeStates]:
        """Compute the frontiers.

        Args:
            growing: the trees that still grow.
            states: those of the last level. `parent_rows` says which row a node's parent has there.

        Returns:
            `[M, V]` float32 logits below the M nodes of the frontiers, and the states of these nodes.
        """


class TreeGrower:
    """Grows a tree for each request: adds a level, expands the best nodes, and repeats.

    A tree stops growing when nothing below its nodes could be among the `Request.max_nodes` best. So trees
    are deeper where the drafter is surer.

    Args:
        shape: which nodes are added and expanded.
        ops: of the target's device.
        max_nodes: size of the largest tree whose tokens are drawn, the root included; None: the shape's.
    """

    def __init__(self, shape: TreeShape, ops: SamplingOps, max_nodes: int | None = None):
        self.shape, self.ops = shape, ops
        self.max_nodes = shape.max_nodes if max_nodes is None else max_nodes

    def grow(
        self, expander: Expander[NodeStates], requests: Sequence[Request], least: float = 0.0
    ) -> list[DraftTree]:
        """Return a tree for each request; the root alone where the expander is not ready.

        Args:
            expander: computes logits.
            requests: the requests to draft for.
            least: a tree stops where its next nodes together are right less often than this, in 0 to 1.
        """
        trees = [DraftTree(request.last_token) for request in requests]
        growing = [
            GrowingTree(request, tree, self._shape_for(request), DraftTree(tree.tokens[0]))
            for request, tree in zip(requests, trees, strict=True)
            if request.max_nodes > 1 and expander.ready(request)
        ]
        if not growing:
            return trees
        logits, states = expander.expand_roots(growing)
        level = 1
        while growing := self._add_level(growing, logits, level, least):
            logits, states = expander.expand_nodes(growing, states)
            level += 1
        return trees

    def _shape_for(self, request: Request) -> TreeShape:
        """Return the grower's shape, or a fixed one if the request's draft tokens are drawn."""
        guessing = request.params.rule.guessing
        if not guessing.draws:
            return self.shape
        size = min(self.max_nodes, request.max_nodes) - 1
        return TemplateShape(draw_template(guessing, self.shape.depth, self.shape.branch, size))

    def _add_level(
        self, growing: Sequence[GrowingTree], logits: Tensor, level: int, least: float
    ) -> list[GrowingTree]:
        """Add level number `level` to all trees, from `[M, V]` logits below their frontiers.

        Returns the trees that go on, with the nodes to expand as their frontiers.
        """
        asked = [Nodes(g.request, g.expanded, g.frontier) for g in growing]
        values, tokens, log_q = likeliest(logits, asked, self.shape.branch, self.ops)
        log_probs, names = download(values, tokens)
        log_q = log_q.cpu() if any(g.is_drawn for g in growing) else log_q  # in one copy
        best = list(zip(log_probs.tolist(), names.tolist(), strict=True))
        begin = 0
        for g in growing:
            end = begin + len(g.frontier)
            added = g.add_level(best[begin:end], log_q[begin:end])
            goes_on = level < min(self.shape.depth, g.request.max_depth)
            g.advance(g.choose(added, least) if goes_on else [], begin)
            begin = end
        return [g for g in growing if g.frontier]


class GrownDrafter(LevelwiseDrafter, Expander[NodeStates]):
    """A drafter whose trees a `TreeGrower` grows, with the drafter as its `Expander`.

    Args:
        target: the model to draft for.
        shape: which nodes a tree gets.
    """

    def __init__(self, target: Target, shape: TreeShape):
        self.target = target
        self.grower, self.max_nodes = TreeGrower(shape, target.model.kernels.sampling), shape.max_nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow a tree for each request that is ready; the others get the root alone."""
        return self.grower.grow(self, requests, self.min_level_gain)


def parent_rows(growing: Sequence[GrowingTree], device: torch.device) -> Tensor:
    """Return `[M]` int64: for each node of the frontiers, its parent's row in the last level."""
    return send([row for g in growing for row in g.parents], device)


_NO_TOKENS = np.empty(0, dtype=np.int64)
