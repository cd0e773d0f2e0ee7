"""Trees that grow level by level, each guess from the one before it: draft models, EAGLE, MTP.

The trees of all requests grow together, one small pass a level. Guesses are made with the target's own noise:
at temperature above 0 the drafter proposes what the target would draw if both agreed (Daliri et al. 2024,
arXiv 2408.07978).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from soothsay.drafters.base import Drafter, Observation, Target, check_at_least_one
from soothsay.drafters.context import Context, FeatureContext, Pass, State, pack
from soothsay.drafters.guesses import draw, guess, likeliest
from soothsay.drafters.head import RecurrentHead, Served
from soothsay.drafters.template import draw_template
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import KVPool
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes
from soothsay.engine.tree import DraftTree

Ranks = tuple[int, ...]
"""A node by the ranks of its path: (0, 2) is the third best guess below the best one."""

AnyContext = TypeVar("AnyContext", bound=Context)


@dataclass(frozen=True, slots=True)
class Guess:
    """A node that was just added."""

    score: float
    node: int  # of the tree
    above: int  # node of the expanded tree that it hangs below
    ranks: Ranks


class Shape(Protocol):
    """Which nodes a tree gets."""

    depth: int
    """Guesses in a row, at most."""

    branch: int
    """Guesses below a node that are looked at, at most."""

    max_nodes: int
    """The largest tree, the root included."""

    def ranks(self, node: Ranks) -> Sequence[int]:
        """Which guesses below `node` are added; 0 is the likeliest."""

    def explored(self, level: Sequence[Guess]) -> list[Guess]:
        """Those of a level that are explored further, the most important first."""


class Confident:
    """The likeliest nodes of each level are explored further (EAGLE-2, Li et al. 2024, arXiv 2406.16858)."""

    def __init__(self, depth: int, width: int, branch: int):
        self.depth, self.width, self.branch = depth, width, branch
        self.max_nodes = 1 + depth if width == branch == 1 else 1 + branch + (depth - 1) * width * branch

    @classmethod
    def within(
        cls, name: str, target: Target, depth: int, width: int | None = None, branch: int | None = None
    ) -> Confident:
        """A shape for drafter `name`. Where it is not said how wide: so that a tree has room for all levels.

        Raises `DrafterError` for numbers below 1.
        """
        if width is None:
            width = max((target.config.max_tree - 1) // max(depth - 1, 1), 1)
        branch = width + 1 if branch is None else branch
        check_at_least_one(name, depth=depth, width=width, branch=branch)
        return cls(depth, width, branch)

    def ranks(self, node: Ranks) -> Sequence[int]:
        """The first few, everywhere."""
        return range(self.branch)

    def explored(self, level: Sequence[Guess]) -> list[Guess]:
        """Those with the best scores."""
        return sorted(level, key=lambda guess: -guess.score)[: self.width]


class Fixed:
    """Always the same nodes, by their ranks. Every prefix of a path in `template` must be in it."""

    def __init__(self, template: Sequence[Sequence[int]]):
        self._below: dict[Ranks, list[int]] = {}
        for *above, rank in template:
            self._below.setdefault(tuple(above), []).append(rank)
        self.depth = max(len(path) for path in template)
        self.branch = 1 + max(max(path) for path in template)
        self.max_nodes = 1 + len(template)

    def ranks(self, node: Ranks) -> Sequence[int]:
        """What the template has below `node`."""
        return self._below.get(node, ())

    def explored(self, level: Sequence[Guess]) -> list[Guess]:
        """Those that the template goes on below, the best scores first."""
        inner = [guess for guess in level if guess.ranks in self._below]
        return sorted(inner, key=lambda guess: -guess.score)


@dataclass(slots=True, eq=False)
class _Growth:
    """A tree on its way: which of its nodes have been run, which are next."""

    request: Request
    state: State
    tree: DraftTree
    shape: Shape
    frontier: range = range(1)  # nodes of `state.expanded` that were run last
    node_of: list[int] = field(default_factory=lambda: [0])  # node of `state.expanded` -> node of `tree`
    ranks_of: list[Ranks] = field(default_factory=lambda: [()])  # node of `state.expanded` -> its ranks
    parents: list[int] = field(default_factory=list)  # of the frontier's nodes, the row of the last pass

    def bound(self) -> float:
        """A score that a node must exceed to be verified: so many are better already. What is below a node
        never scores higher than it does."""
        scores = self.tree.scores
        return sorted(scores)[-self.request.max_nodes] if len(scores) >= self.request.max_nodes else -math.inf


class GrownDrafter(Drafter, Generic[AnyContext]):
    """Runs the nodes of a level, guesses below them, and goes on with the best, as long as what comes below
    may be verified: the surer its guesses, the deeper a tree.

    A subclass says what running means. It may keep an output `[M, H]` float32 of each row, from which its
    logits come, and which the rows of the next level read.
    """

    def __init__(self, target: Target, context: AnyContext, shape: Shape):
        self.target, self.context, self.shape = target, context, shape
        self.max_nodes = shape.max_nodes

    @abstractmethod
    def _outputs(self, batch: Pass) -> Tensor:
        """Run a pass; `[M, H]` outputs of its logit rows."""

    @abstractmethod
    def _logits(self, outputs: Tensor) -> Tensor:
        """`[M, H] -> [M, V]` float32 in the target's vocabulary, minus infinity for what it cannot say."""

    @abstractmethod
    def _open(self, request: Request) -> State | None:
        """The request's state, or None if nothing can be guessed yet."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow a tree for each request, all of them level by level together."""
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        growing = []
        for request, tree in zip(requests, trees, strict=True):
            state = self._open(request) if request.max_nodes > 1 else None
            if state is not None:
                state.expanded = DraftTree(tree.tokens[0])
                growing.append(_Growth(request, state, tree, self._shape_of(request)))
        outputs = self._run_pending(growing) if growing else torch.empty(0)
        for level in range(1, self.shape.depth + 1):
            growing = self._grow(growing, self._logits(outputs), level) if growing else []
            if not growing:
                break
            outputs = self._run_level(growing, outputs)
        return trees

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.context.reset()

    def _shape_of(self, request: Request) -> Shape:
        """The drafter's own, or a fixed one if the request's guesses are drawn."""
        guessing = request.params.rule.guessing
        if not guessing.draws:
            return self.shape
        size = min(self.max_nodes, request.max_nodes) - 1
        return Fixed(draw_template(guessing, self.shape.depth, self.shape.branch, size))

    def _run_pending(self, growing: Sequence[_Growth]) -> Tensor:
        """Run committed tokens that have no KV yet; `[R, H]` outputs of the roots."""
        outputs: dict[Request, Tensor] = {}
        for batch in self.context.catch_up({g.request: g.state.expanded for g in growing}):
            outputs.update(zip(batch.ends, self._outputs(batch), strict=True))
        return torch.stack([outputs[growth.request] for growth in growing])

    def _run_level(self, growing: Sequence[_Growth], outputs: Tensor) -> Tensor:
        """Run the frontiers; `[M, H]`. `outputs` are those of the frontiers before."""
        parents = torch.tensor([row for g in growing for row in g.parents], device=outputs.device)
        read = torch.split(outputs.index_select(0, parents), [len(g.parents) for g in growing])
        rows = [
            Rows(
                _NO_TOKENS,
                len(g.request.tokens),
                g.request.table,
                g.state.expanded,
                g.frontier.start,
                g.state.first_key,
            )
            for g in growing
        ]
        return self._outputs(Pass([g.request for g in growing], rows, list(read)))

    def _grow(self, growing: Sequence[_Growth], logits: Tensor, level: int) -> list[_Growth]:
        """Add a level to every tree; return those that go on, their frontier set to the nodes to run next."""
        asked = [Nodes(g.request, g.state.expanded, g.frontier) for g in growing]
        values, tokens, log_q = likeliest(logits, asked, self.shape.branch)
        best, going, row = list(zip(values.tolist(), tokens.tolist(), strict=True)), [], 0
        for growth in growing:
            tree, expanded, request = growth.tree, growth.state.expanded, growth.request
            first_row, before = row, growth.frontier
            drawn = request.params.rule.guessing.draws  # of these trees the shape is not for values to decide
            bound, added = -math.inf if drawn else growth.bound(), []
            for above in before:
                ranks = growth.shape.ranks(growth.ranks_of[above])
                if drawn:
                    nodes = draw(tree, growth.node_of[above], log_q[row], len(ranks), request)
                else:
                    nodes = guess(tree, growth.node_of[above], best[row], ranks, bound)
                for rank, node in nodes.items():
                    added.append(Guess(tree.scores[node], node, above, (*growth.ranks_of[above], rank)))
                row += 1
            goes_on = level < min(self.shape.depth, request.max_depth)
            room = request.max_nodes - len(expanded) if goes_on else 0
            growth.frontier, growth.parents = range(len(expanded), len(expanded)), []
            explored = growth.shape.explored(added)[: max(room, 0)]
            if not drawn:
                bound = growth.bound()
                explored = [new for new in explored if new.score > bound]
                if sum(math.exp(new.score) for new in explored) < self.least:
                    explored = []
            for new in explored:
                if tree.tokens[new.node] not in request.end_tokens:
                    expanded.add(new.above, tree.tokens[new.node])
                    growth.node_of.append(new.node)
                    growth.ranks_of.append(new.ranks)
                    growth.parents.append(first_row + new.above - before.start)
            growth.frontier = range(growth.frontier.start, len(expanded))
            if growth.frontier:
                going.append(growth)
        return going


class RecurrentDrafter(GrownDrafter[FeatureContext]):
    """A head that continues from its own output drafts."""

    trained = True

    def __init__(self, target: Target, served: Served[RecurrentHead], shape: Shape):
        c, head = served.head.config.block, served.head
        size = target.num_blocks, target.config.block_size
        pool = KVPool((c.num_layers, c.num_kv_heads, c.head_dim), *size, head.dtype, target.model.device)
        super().__init__(target, FeatureContext(target, pool), shape)
        self.served, self.taps = served, served.taps

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep what the next rows read."""
        for batch in self.context.observe(observations, self.served.fuse):
            self._outputs(batch)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, once what it has computed is of use to others."""
        for batch in self.context.close(request):
            self._outputs(batch)

    def _open(self, request: Request) -> State | None:
        return self.context.states[request] if self.context.ready(request) else None

    def _outputs(self, batch: Pass) -> Tensor:
        packed = self._pack(batch)
        embedded = self.served.head.embed(packed.tokens, self.served.shared)
        out: Tensor = self.served.head(
            embedded, torch.cat(batch.features), packed, self.context.pool.layers[0]
        )
        return out.index_select(0, packed.logit_rows)

    def _pack(self, batch: Pass) -> Batch:
        c = self.served.head.config.block
        return pack(batch.rows, self.target, c.group, c.windows)

    def _logits(self, outputs: Tensor) -> Tensor:
        return self.served.head.logits(outputs, self.served.shared)


_NO_TOKENS = np.empty(0, dtype=np.int64)
