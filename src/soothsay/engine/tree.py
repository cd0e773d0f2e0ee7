"""The draft tree: what a drafter guesses, what one forward pass verifies."""

from __future__ import annotations

from collections.abc import Sequence


class DraftTree:
    """Guesses for one request. Node 0 is the root: the last committed token, always right.

    A node's parent comes before it (`parents[i] < i`), siblings have distinct tokens, and `scores[i]`, the
    drafter's estimate of log P(the path to i is accepted), never rises downward. Adding a token that a parent
    already has returns the node that is there, so that merging several guesses into a trie is just adding
    them all.

    Plain Python lists: trees have tens of nodes, are built on the host one node at a time and walked a few
    times, where lists are an order of magnitude faster than tensors.

    Example:
        >>> tree = DraftTree(7)
        >>> tree.extend([1, 2, 3])
        3
        >>> tree.extend([1, 2, 9])
        4
        >>> tree.parents
        [-1, 0, 1, 2, 2]
    """

    __slots__ = ("children", "depths", "parents", "scores", "tokens")

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.scores = [0.0]
        self.children: list[dict[int, int]] = [{}]  # of each node: token -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_prob: float = 0.0) -> int:
        """The child of `parent` with this token, made if need be; `log_prob` is of this step alone."""
        score = self.scores[parent] + min(log_prob, 0.0)
        node = self.children[parent].get(token)
        if node is not None:
            self.scores[node] = max(self.scores[node], score)
            return node
        node = len(self.tokens)
        self.children[parent][token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.children.append({})
        return node

    def extend(self, tokens: Sequence[int], log_prob: float = 0.0, parent: int = 0) -> int:
        """Add a chain below `parent`, each token at `log_prob` given the last; return its last node."""
        for token in tokens:
            parent = self.add(parent, int(token), log_prob)
        return parent

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The root and the nodes met when following `tokens` down from it, as far as the tree goes."""
        nodes = [0]
        for token in tokens:
            child = self.children[nodes[-1]].get(token)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def paths(self) -> list[list[int]]:
        """One path for each leaf, from the root, in order of the leaves' numbers. A lone root is a leaf."""
        return [self.path(node) for node, children in enumerate(self.children) if not children]

    def prune(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The `max_nodes` best-scored nodes no deeper than `max_depth`, the root among them; this tree if all
        fit.

        A parent scores at least as high as its child and comes before it, so the best nodes always form a
        tree.
        """
        if len(self) <= max_nodes and max(self.depths) <= max_depth:
            return self
        allowed = [node for node in range(1, len(self)) if self.depths[node] <= max_depth]
        best = sorted(allowed, key=lambda node: (-self.scores[node], node))[: max(max_nodes, 1) - 1]
        pruned = DraftTree(self.tokens[0])
        renamed = {0: 0}
        for node in sorted(best):
            parent = self.parents[node]
            log_prob = self.scores[node] - self.scores[parent]
            renamed[node] = pruned.add(renamed[parent], self.tokens[node], log_prob)
        return pruned
