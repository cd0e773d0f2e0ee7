"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): beside the words that it says, the target itself
makes n-grams to guess with, by Jacobi iteration on a window of guesses.

The window is a tree. Its spine is a chain of guesses below the root, one for each of the next positions; from
every node of the spine hangs a branch, of what the target has drawn behind that node in the steps before. The
draw at a branch's end makes it longer by one. When it has the length of an n-gram, it goes into the pool, and
all but its first token stay in the window, one position further on, where the second becomes the spine's new
guess. This is the paper's two-dimensional window with the paper's mask: there, too, a token sees the spine up
to its column, and its own diagonal. N-grams of the pool that begin with the last token are verified in
the same tree.

What differs from the paper: the window is verified like all else (the draws at its nodes are the target's
own, so that a right guess in it is as good as one from the pool); a column that the text has run over is
begun anew with one token of the text, and grows by a draw a step until it is as long as the others; the pool
is shared by all requests and outlives them, and has the n-grams of the texts, too.

Above temperature 0 the noise of a position is the same in every step, so that the iteration has a fixed
point, which is what plain decoding will say; and since noise has much to say in what is drawn, a draw behind
wrong words is often right all the same.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from soothsay.drafters.base import Drafter, Observation, Target, check_at_least_one
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes, best_tokens, perturb
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError

Columns = dict[int, list[int]]
"""Guesses from a position on; the first is of the position itself."""

FROM_POOL, FROM_WINDOW = math.log(0.4), math.log(0.1)
"""Log-probabilities of a guess, given those before it: what was seen with the bundled model, roughly."""


class Lookahead(Drafter):
    """Verifies n-grams of a pool, and makes new ones in a window.

    Args:
        target: the model to draft for.
        window: columns, positions ahead at which n-grams are made; 0: they only come from the text.
        ngram: tokens of an n-gram; one less is guessed in a row.
        guesses: n-grams of each first token, the latest: as many are kept and verified.
        pool: first tokens that have n-grams, at most; the one that is longest without new ones is forgotten.

    Raises `DrafterError` for numbers that are too small.
    """

    def __init__(self, target: Target, window: int = 4, ngram: int = 3, guesses: int = 3, pool: int = 65_536):
        check_at_least_one("lookahead", guesses=guesses, pool=pool)
        if window < 0 or ngram < 2:
            raise DrafterError(
                f"lookahead(window={window}, ngram={ngram}): needs a window of at least 0 columns, and "
                "n-grams of at least 2 tokens"
            )
        self.window, self.ngram, self.guesses, self.pool = window, ngram, guesses, pool
        self.max_nodes = 1 + (guesses + window) * (ngram - 1)
        self.reset()

    def reset(self) -> None:
        """Forget all n-grams."""
        self._pool: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()  # latest last, both of them
        self._columns: dict[Request, Columns] = {}
        self._read: dict[Request, int] = {}  # tokens whose n-grams are in the pool
        self._random = random.Random(0)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """N-grams of the pool below the root, and the window as far as there is room for it."""
        return [self._propose(request) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Move the windows on by what was drawn at the ends of their branches."""
        for seen in observations:
            columns = self._columns.get(seen.request)
            if columns is not None and seen.tree is not None:
                self._columns[seen.request] = self._move_on(columns, seen, seen.tree)

    def release(self, request: Request) -> None:
        """Forget a request; its n-grams stay."""
        self._columns.pop(request, None)
        self._read.pop(request, None)

    def _propose(self, request: Request) -> DraftTree:
        self._read_new(request)
        tokens, root = request.tokens, int(request.tokens[-1])
        tree = DraftTree(root)
        if request.max_depth < 1:
            return tree
        for ngram in reversed(self._pool.get(root, {})):
            tree.extend(ngram, FROM_POOL)
        old, new, spine = self._columns.get(request, {}), Columns(), 0
        for position in range(len(tokens), len(tokens) + self.window):
            column = old.get(position) or [int(tokens[self._random.randrange(len(tokens))])]
            if len(tree) + len(column) > request.max_nodes:
                break
            tree.extend(column, FROM_WINDOW, spine)
            spine = tree.children[spine][column[0]]
            new[position] = column
        self._columns[request] = new
        return tree

    def _move_on(self, columns: Columns, seen: Observation, tree: DraftTree) -> Columns:
        """The columns after a step; those whose branches were not verified do not grow.

        All of them go on with the text, those that are still short too: they began with any token, so that
        one place is as good as another.
        """
        whole: list[tuple[int, list[int]]] = []  # the columns, in a row
        ends: dict[int, int] = {}  # position -> the last node of its column, where that was verified
        for position, column in _in_a_row(columns, len(seen.request.tokens)):
            path = [*(above[0] for _, above in whole), *column]
            nodes = tree.walk(path)
            if len(nodes) == 1 + len(path):
                ends[position] = nodes[-1]
            whole.append((position, column))
        draws = self._draws(seen, tree, list(ends.values()))
        moved = Columns()
        for position, column in whole:
            if position in ends:
                column = [*column, draws[ends[position]]]
                if len(column) == self.ngram:
                    self._add(column)
                    column = column[1:]
            moved[position + 1] = column
        return moved

    def _draws(self, seen: Observation, tree: DraftTree, nodes: Sequence[int]) -> dict[int, int]:
        """What the target would emit after each of some nodes."""
        if not nodes or seen.logits is None:
            return {}
        scores = perturb(seen.logits[list(nodes)], [Nodes(seen.request, tree, nodes)])
        return dict(zip(nodes, best_tokens(scores), strict=True))

    def _read_new(self, request: Request) -> None:
        """Put the n-grams of committed tokens that are new into the pool."""
        first = max(self._read.get(request, 0) - self.ngram + 1, 0)
        tokens = request.tokens[first:].tolist()
        self._read[request] = len(request.tokens)
        for begin in range(len(tokens) - self.ngram + 1):
            self._add(tokens[begin : begin + self.ngram])

    def _add(self, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool, as the latest."""
        first, *rest = ngram
        known = self._pool.setdefault(first, {})
        self._pool.move_to_end(first)
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]
        if len(self._pool) > self.pool:
            self._pool.popitem(last=False)


def _in_a_row(columns: Columns, position: int) -> Iterator[tuple[int, list[int]]]:
    """Columns from a position on, up to the first that is missing."""
    while (column := columns.get(position)) is not None:
        yield position, column
        position += 1
