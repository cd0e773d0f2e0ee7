"""The draft tree: the draft tokens of one request that one forward pass verifies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import le

from soothsay.core.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Draws:
    """Children of a node that were drawn from a distribution.

    Their number and scores must not depend on the drawn tokens: `log_probs` depend on the order alone, and
    never rise. So cutting a tree by its scores cannot favour some tokens.
    """

    tokens: tuple[int, ...]  # in the order drawn; with replacement, a token may repeat
    log_probs: tuple[float, ...]  # for each, of its acceptance
    q: FloatArray  # [V] the distribution of the first draw; sums to 1
    replaced: bool  # True: all were drawn from q; False: each from q without the tokens before it

    def rounds(self) -> Iterator[tuple[int, FloatArray]]:
        """Each token with the distribution that it was drawn from, `[V]`, given the tokens before it."""
        q = self.q
        for token in self.tokens:
            yield token, q
            if not self.replaced:
                q = q.copy()
                q[token] = 0.0
                q /= max(float(q.sum()), 1e-300)


class DraftTree:
    """The draft tokens of one request. Node 0 is the root: the last committed token.

    Invariants: a node's parent comes before it (`parents[i] < i`), siblings have distinct tokens, and a score
    never exceeds its parent's. `scores[i]` is the drafter's estimate of log P(the path to i is accepted).
    Adding a token that a parent already has returns the existing node, so adding several sequences merges
    them into a trie.

    For some verifiers, a drafter draws tokens from its distribution. `draws` records them, by parent.
    Dropping `draws` keeps the output distribution and lowers acceptance. The decision must not depend on the
    drawn tokens. `prune` keeps `draws`.

    The tree is made of Python lists. It has tens of nodes, is built node by node on the host and walked a few
    times, where lists are ten times faster than tensors.

    Example:
        >>> tree = DraftTree(7)
        >>> tree.extend([1, 2, 3])
        3
        >>> tree.extend([1, 2, 9])
        4
        >>> tree.parents
        [-1, 0, 1, 2, 2]
    """

    __slots__ = ("_children", "depths", "draws", "parents", "scores", "tokens")

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.scores = [0.0]
        self._children: list[dict[int, int]] = []  # of the first nodes
        self.draws: dict[int, Draws] = {}  # by node, where children were drawn

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def children(self) -> list[dict[int, int]]:
        """For each node: token -> node. It is made up to the last node when it is read."""
        children, parents, tokens = self._children, self.parents, self.tokens
        for node in range(len(children), len(tokens)):
            children.append({})
            if node:
                children[parents[node]][tokens[node]] = node
        return children

    def add(self, parent: int, token: int, log_prob: float = 0.0) -> int:
        """The child of `parent` with this token, added if missing. `log_prob` is given the parent.

        What is above 0 counts as 0, and NaN as minus infinity.
        """
        score = self.scores[parent] + (min(log_prob, 0.0) if log_prob == log_prob else -inf)
        children = self.children
        node = children[parent].get(token)
        if node is not None:
            self.scores[node] = max(self.scores[node], score)
            return node
        node = children[parent][token] = len(children)
        children.append({})
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        return node

    def extend(self, tokens: Sequence[int], log_prob: float = 0.0, parent: int = 0) -> int:
        """Add a chain below `parent`, each with `log_prob` given the one before. Returns the last node."""
        for token in tokens:
            parent = self.add(parent, int(token), log_prob)
        return parent

    def include(self, other: DraftTree) -> list[int]:
        """Add the nodes of a tree with the same root. A node of both keeps its better score.

        Returns the node of this tree for each node of the other one.
        """
        nodes, scores = [0], other.scores
        for node in range(1, len(other)):
            parent = other.parents[node]
            nodes.append(self.add(nodes[parent], other.tokens[node], scores[node] - scores[parent]))
        return nodes

    def append_nodes(self, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> None:
        """Append nodes in bulk to a tree that has only its root. Scores obey the class invariants.

        Raises `ValueError` if a parent does not come before its child, or siblings have equal tokens.
        """
        size = len({*zip(parents, tokens, strict=True)})
        if size < len(tokens) or not all(map(le, parents, range(size))) or min(parents, default=0) < 0:
            raise ValueError(
                f"nodes cannot have the tokens {[*tokens]} below the nodes {[*parents]}: a parent comes "
                "before its child, from 0 on, and siblings have distinct tokens"
            )
        self.tokens += tokens
        self.parents += parents
        self.scores += scores
        depths = self.depths
        for parent in parents:
            depths.append(depths[parent] + 1)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The root and the nodes below it that spell `tokens`, as far as the tree has them."""
        nodes, node, size = [0], 0, len(self.tokens)
        for token in tokens:
            below = range(node + 1, size)
            node = next((n for n in below if self.tokens[n] == token and self.parents[n] == node), 0)
            if not node:
                break
            nodes.append(node)
        return nodes

    def places_in(self, other: DraftTree, nodes: Iterable[int]) -> dict[int, int]:
        """The nodes of another tree that spell the same as nodes of this one, for those that it has.

        A node comes after its parent, unless that is the root. The trees have the same root.
        """
        places = {0: 0}
        for node in nodes:
            above = places.get(self.parents[node])
            place = None if above is None else other.children[above].get(self.tokens[node])
            if place is not None:
                places[node] = place
        del places[0]
        return places

    def paths(self) -> list[list[int]]:
        """One path for each leaf, from the root, in order of the leaves' numbers. A lone root is a leaf."""
        return [self.path(node) for node, children in enumerate(self.children) if not children]

    def prune(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The `max_nodes` best nodes by score within `max_depth`, the root included; this tree if all fit.

        A parent scores at least as high as its child and comes before it, so the best nodes form a tree.

        Example:
            >>> tree = DraftTree(7)
            >>> tree.extend([1, 2], log_prob=-1.0)
            2
            >>> tree.add(0, 3, log_prob=-0.5)
            3
            >>> pruned = tree.prune(max_nodes=3, max_depth=2)
            >>> pruned.tokens, pruned.parents
            ([7, 1, 3], [-1, 0, 0])
        """
        more = sum([len(own.tokens) - len({*own.tokens}) for own in self.draws.values()]) if self.draws else 0
        if len(self.tokens) + more <= max_nodes and max(self.depths) <= max_depth:
            return self
        if self.draws:
            return self._prune_drawn(max_nodes, max_depth)
        allowed = [node for node in range(1, len(self)) if self.depths[node] <= max_depth]
        best = sorted(allowed, key=lambda node: (-self.scores[node], node))[: max(max_nodes, 1) - 1]
        return self.subtree(best)

    def subtree(self, nodes: Iterable[int]) -> DraftTree:
        """The tree of the root and `nodes`, which include their parents; without draws."""
        some = sorted(nodes)
        renamed = {0: 0} | {node: place for place, node in enumerate(some, start=1)}
        kept = DraftTree(self.tokens[0])
        kept.append_nodes(
            [self.tokens[node] for node in some],
            [renamed[self.parents[node]] for node in some],
            [self.scores[node] for node in some],
        )
        return kept

    def _prune_drawn(self, max_nodes: int, max_depth: int) -> DraftTree:
        """`prune` for a tree with draws, draw by draw.

        A repeated draw counts as a node. Otherwise the tree would keep repeated tokens more often.
        """
        guesses: list[tuple[float, int, int, int]] = []  # minus its score, parent, place, node
        for parent, children in enumerate(self.children):
            drawn = self.draws.get(parent)
            tokens: tuple[int, ...] = drawn.tokens if drawn else ()
            for place, token in enumerate(tokens):
                score = self.scores[parent] + (drawn.log_probs[place] if drawn else 0.0)
                guesses.append((-score, parent, place, children[token]))
            rest = [node for token, node in children.items() if token not in tokens]
            guesses += [(-self.scores[node], parent, node, node) for node in rest]
        allowed = sorted(guess for guess in guesses if self.depths[guess[1]] < max_depth)
        pruned, renamed, drawn_below = DraftTree(self.tokens[0]), {0: 0}, dict.fromkeys(self.draws, 0)
        for score, parent, _, node in allowed[: max(max_nodes, 1) - 1]:
            token = self.tokens[node]
            renamed[node] = pruned.add(renamed[parent], token, -score - self.scores[parent])
            if parent in drawn_below and token in self.draws[parent].tokens:
                drawn_below[parent] += 1
        for parent, count in drawn_below.items():
            if count:
                old = self.draws[parent]
                pruned.draws[renamed[parent]] = replace(
                    old, tokens=old.tokens[:count], log_probs=old.log_probs[:count]
                )
        return pruned
