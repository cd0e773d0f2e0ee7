"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target makes n-grams while it decodes, by Jacobi
iteration on a window of guessed tokens. These n-grams are its drafts.

The window is a tree. Its spine is a chain below the root with one guess for each of the next positions. From
every node of the spine hangs a branch: the tokens that the target drew after that node in earlier steps. The
draw at the end of a branch makes it longer by one. A branch that has the length of an n-gram goes into the
pool. Its other tokens, without the first, stay in the window, one position further on; the second token
becomes the spine's guess there. This is the paper's two-dimensional window with the paper's mask: there, too,
a token sees the spine up to its column, and its own diagonal. The n-grams of the pool that begin with the
last committed token are verified in the same tree.

    A window of two columns, n-grams of three tokens, after some steps (root r):

        r -> a1 -> a2        column 1: a1 is the spine's guess of the next token, a2 was drawn after it
             a1 -> b1 -> b2  column 2: b1 is the spine's guess of the token after that

    The draw after a2 is c: (a1, a2, c) goes into the pool, and (a2, c) stays, one position further on.

Three things differ from the paper. The window is verified like all other drafts: the draws at its nodes are
the target's own, so a right guess in it is as good as one from the pool. A column that the text has overtaken
begins again with one token of the text, and grows by a draw a step until it is as long as the others. And all
requests of a tenant share one pool, which outlives them and has the n-grams of their texts too.

Above temperature 0, a position has the same noise in every step. So the iteration has a fixed point, which is
what plain decoding emits. And since noise decides much of a draw, a draw after wrong tokens is often right.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from soothsay.core.noise import noise_key
from soothsay.core.request import Observation, Request
from soothsay.core.sampling import Nodes, draw, perturb
from soothsay.core.tenant import PerTenant
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing
from soothsay.drafters.base import Drafter, Target, check_at_least_one
from soothsay.errors import DrafterError

Columns = dict[int, list[int]]
"""Maps a position to guesses of the tokens from this position on."""

Pool = OrderedDict[int, dict[tuple[int, ...], None]]
"""Maps a first token to the other tokens of its n-grams. The latest come last, in both."""

FROM_POOL, FROM_WINDOW = math.log(0.4), math.log(0.1)
"""Log-probabilities that a token is right if all tokens above it are: rough measurements with the bundled
model."""


class Lookahead(Drafter):
    """Proposes n-grams of a pool, and makes new ones in a window.

    Args:
        target: the model to draft for.
        window: number of columns, positions ahead at which n-grams are made; 0: n-grams come from texts only.
        ngram: tokens of an n-gram. A draft has one token less in a row.
        guesses: the number of n-grams that are kept and verified for each first token, the latest ones.
        pool: the largest number of first tokens for each tenant. The one without new n-grams for the longest
            time is dropped.

    Attributes:
        pools: each tenant's n-grams.

    Raises:
        DrafterError: a number is too small.
    """

    def __init__(self, target: Target, window: int = 4, ngram: int = 3, guesses: int = 3, pool: int = 65_536):
        check_at_least_one("lookahead", guesses=guesses, pool=pool)
        if window < 0 or ngram < 2:
            raise DrafterError(
                f"lookahead(window={window}, ngram={ngram}): needs a window of at least 0 columns, and "
                "n-grams of at least 2 tokens"
            )
        self.ops = target.model.kernels.sampling
        self.window, self.ngram, self.guesses, self.pool = window, ngram, guesses, pool
        self.max_nodes = 1 + (guesses + window) * (ngram - 1)
        self.reset()

    def reset(self) -> None:
        """Forget all n-grams."""
        self.pools: PerTenant[Pool] = PerTenant(OrderedDict)
        self._columns: dict[Request, Columns] = {}
        self._read: dict[Request, int] = {}  # number of tokens whose n-grams are in the pool

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return trees of the pool's n-grams and of the window, as far as there is room for it."""
        return [self._propose(request) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Add what was drawn at the ends of the windows' branches, and move the windows on."""
        for seen in observations:
            columns = self._columns.get(seen.request)
            if columns is not None and seen.tree is not None:
                self._columns[seen.request] = self._move_on(columns, seen, seen.tree)

    def release(self, request: Request) -> None:
        """Forget a request. Its n-grams stay."""
        self._columns.pop(request, None)
        self._read.pop(request, None)

    def _propose(self, request: Request) -> DraftTree:
        """Return a request's tree, and keep the columns that are in it."""
        self._read_new(request)
        tokens, root = request.tokens, request.last_token
        tree = DraftTree(root)
        if request.max_depth < 1:
            return tree
        for ngram in reversed(self.pools[request.tenant].get(root, {})):
            tree.extend(ngram, FROM_POOL)
        old, new, spine = self._columns.get(request, {}), Columns(), 0
        for position in range(len(tokens), len(tokens) + self.window):
            column = old.get(position) or [int(tokens[noise_key(request.seed, position)[0] % len(tokens)])]
            if len(tree) + len(column) > request.max_nodes:
                break
            tree.extend(column, FROM_WINDOW, spine)
            spine = tree.children[spine][column[0]]
            new[position] = column
        self._columns[request] = new
        return tree

    def _move_on(self, columns: Columns, seen: Observation, tree: DraftTree) -> Columns:
        """Return the columns after a step. Columns whose branches were not verified do not grow.

        All columns move one position on, short ones too. A short column began with any token of the text, so
        one position is as good for it as another.
        """
        whole: list[tuple[int, list[int]]] = []  # columns at consecutive positions
        ends: dict[int, int] = {}  # position -> the last node of its column, if that was verified
        for position, column in _in_a_row(columns, seen.request.length):
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
                    self._add(seen.request, column)
                    column = column[1:]
            moved[position + 1] = column
        return moved

    def _draws(self, seen: Observation, tree: DraftTree, nodes: Sequence[int]) -> dict[int, int]:
        """Return the token that the target would emit after each of `nodes`."""
        if not nodes or seen.logits is None:
            return {}
        asked, logits = Nodes(seen.request, tree, nodes), seen.logits[list(nodes)]
        if seen.request.params.rule.guessing is Guessing.SHARED_NOISE:
            tokens, _ = draw(logits, [asked], self.ops).wait()
        else:
            tokens = self.ops.argmax(perturb(logits, [asked], self.ops)).tolist()
        return dict(zip(nodes, tokens, strict=True))

    def _read_new(self, request: Request) -> None:
        """Put the n-grams of newly committed tokens into the pool."""
        first = max(self._read.get(request, 0) - self.ngram + 1, 0)
        tokens = request.tokens[first:].tolist()
        self._read[request] = request.length
        for begin in range(len(tokens) - self.ngram + 1):
            self._add(request, tokens[begin : begin + self.ngram])

    def _add(self, request: Request, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool of a request's tenant, as the latest."""
        pool = self.pools[request.tenant]
        first, *rest = ngram
        known = pool.setdefault(first, {})
        pool.move_to_end(first)
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]
        if len(pool) > self.pool:
            pool.popitem(last=False)


def _in_a_row(columns: Columns, position: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the columns from `position` on, up to the first position that has none."""
    while (column := columns.get(position)) is not None:
        yield position, column
        position += 1
