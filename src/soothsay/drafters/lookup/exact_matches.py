"""Drafters that propose what followed earlier occurrences of the last tokens. They need no model and no
training.

Prompt lookup searches the same request (Saxena 2023, prompt lookup decoding; Yang et al. 2023, LLMA, arXiv
2304.04487). It is strong if an answer repeats its prompt or itself: summaries, edits, retrieval, code. REST
searches a datastore of texts (He et al. 2023, arXiv 2311.08252), which has earlier answers of the target, or
similar texts; `soothsay datastore build` makes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from soothsay.core.arrays import IntArray
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, Target
from soothsay.drafters.lookup.text_store import SORTED_BY, Datastore, check_tokenizer
from soothsay.drafters.ops.continuations import LEAST
from soothsay.drafters.places import drafters_beside
from soothsay.errors import DrafterError, MissingDrafterError
from soothsay.files import user_path


class PromptLookup(Drafter):
    """Finds earlier occurrences of a request's last tokens, and proposes what followed them.

    The longest matches come first, and the latest of equally long ones. Their continuations merge into a
    trie. It has no state: one vectorized pass over the request's tokens is faster than updating an index.

    Args:
        target: the model to draft for.
        max_ngram: maximum length of a match, in tokens.
        min_ngram: minimum length of a match, in tokens.
        num_tokens: number of tokens proposed after a match.
        num_matches: maximum number of matches in the trie.
    """

    def __init__(
        self,
        target: Target,
        max_ngram: int = 8,
        min_ngram: int = 2,
        num_tokens: int = 10,
        num_matches: int = 3,
    ):
        if not 1 <= min_ngram <= max_ngram or num_tokens < 1 or num_matches < 1:
            raise DrafterError(
                f"prompt-lookup(max_ngram={max_ngram}, min_ngram={min_ngram}, num_tokens={num_tokens}, "
                f"num_matches={num_matches}): needs 1 <= min_ngram <= max_ngram, and the others at least 1"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.num_tokens, self.num_matches = num_tokens, num_matches
        self.max_nodes = 1 + num_tokens * num_matches

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A trie of continuations for each request; only the root if nothing matches."""
        return [
            self._propose(request.tokens, min(self.num_tokens, request.max_depth)) for request in requests
        ]

    def _propose(self, tokens: IntArray, depth: int) -> DraftTree:
        tree = DraftTree(int(tokens[-1]))
        if depth < 1:
            return tree
        for end, length in find_matches(tokens, self.max_ngram, self.min_ngram)[: self.num_matches]:
            # acceptance rises with the length of the match; 0.9 after eight tokens is typical
            tree.extend(tokens[end : end + depth].tolist(), log_prob=math.log((length + 1) / (length + 2)))
        return tree


def find_matches(tokens: IntArray, longest: int, shortest: int) -> list[tuple[int, int]]:
    """Earlier occurrences of the last tokens.

    Returns:
        Pairs (index after the occurrence, its length), longest first, then latest. Lengths are capped at
        `longest`, and matches shorter than `shortest` are left out.

    Example:
        >>> find_matches(np.array([1, 2, 3, 9, 2, 3, 1, 2, 3]), 3, 1)
        [(3, 3), (6, 2)]
    """
    size = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # indices after an occurrence of the last token
    lengths = np.ones(len(ends), dtype=np.int64)
    alive = np.arange(len(ends))
    for length in range(2, min(longest, size - 1) + 1):
        alive = alive[ends[alive] >= length]
        alive = alive[tokens[ends[alive] - length] == tokens[size - length]]
        if len(alive) == 0:
            break
        lengths[alive] = length
    order = np.lexsort((-ends, -lengths))
    return [(int(ends[i]), int(lengths[i])) for i in order if lengths[i] >= shortest]


WEIGHTS = tuple(2.0**length for length in range(9))
"""Weight of a match by its length in tokens; longer matches have the last one. With these weights, estimated
and measured acceptance agree for a datastore of the target's own answers."""

DOUBT = 16.0
"""Weight of all tokens that the datastore lacks. A single match of four tokens then has probability 1/2."""


class Rest(Drafter):
    """Finds the longest matches of the last tokens in a datastore, and proposes what followed them.

    Continuations merge into a trie, and the likeliest nodes are proposed. The paper uses the longest match
    alone. This drafter uses shorter matches too, weighted by their length.

    Args:
        target: the model to draft for.
        store: a file that `soothsay datastore build` made for the target's tokenizer. Empty:
            `drafters/rest.store` beside the target's weights.
        max_ngram: maximum length of a match in tokens, at most 16.
        min_ngram: minimum length of the longest match; below it nothing is proposed.
        num_tokens: number of tokens proposed after a match.
        num_matches: maximum number of matches; of more, an even choice.
        nodes: maximum size of a tree, without the root.
    """

    def __init__(
        self,
        target: Target,
        store: str | Path = "",
        max_ngram: int = SORTED_BY,
        min_ngram: int = 1,
        num_tokens: int = 10,
        num_matches: int = 16,
        nodes: int = 15,
    ):
        if not 1 <= min_ngram <= max_ngram <= SORTED_BY or min(num_tokens, num_matches, nodes) < 1:
            raise DrafterError(
                f"rest(max_ngram={max_ngram}, min_ngram={min_ngram}, num_tokens={num_tokens}, "
                f"num_matches={num_matches}, nodes={nodes}): needs 1 <= min_ngram <= max_ngram <= "
                f"{SORTED_BY}, and the others at least 1"
            )
        self.store = open_store(store, target)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.num_tokens, self.num_matches = num_tokens, num_matches
        self.max_nodes = 1 + nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations for each request; only the root if nothing matches."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(request.last_token)
        depth, size = min(self.num_tokens, request.max_depth), min(self.max_nodes, request.max_nodes)
        if depth < 1 or size < 2:
            return tree
        matches = self.store.find(request.tokens, self.num_matches, self.max_ngram)
        if matches.lengths and matches.lengths[0] >= self.min_ngram:
            continuations = self.store.continuations(matches, depth)
            grow_likeliest(tree, continuations, matches.lengths, size)
        return tree


def grow_likeliest(
    tree: DraftTree, continuations: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> None:
    """Add the likeliest nodes of the trie of continuations to `tree`, until it has `size` nodes.

    A continuation after n matching tokens has weight `WEIGHTS[n]`, and all other continuations together have
    `DOUBT`. Below a node, only the continuations through that node count.

    Args:
        tree: has only its root; is changed.
        continuations: `[matches]`, the tokens after each match.
        lengths: of the match before each continuation, in tokens.
        size: maximum size of the tree, the root included.
    """
    weights = [WEIGHTS[min(length, len(WEIGHTS) - 1)] for length in lengths]
    # minus the score, tree size when pushed, token, parent, log-probability, continuations through it
    heap: list[tuple[float, int, int, int, float, list[int]]] = []

    def push(node: int, through: Sequence[int]) -> None:
        depth, total = tree.depths[node], DOUBT
        below: dict[int, list[int]] = {}
        for i in through:
            total += weights[i]
            if depth < len(continuations[i]):
                below.setdefault(continuations[i][depth], []).append(i)
        for token, own in below.items():
            log_prob = math.log(sum([weights[i] for i in own]) / total)
            score = tree.scores[node] + log_prob
            if score >= math.log(LEAST):
                heappush(heap, (-score, len(tree), token, node, log_prob, own))

    push(0, range(len(continuations)))
    while heap and len(tree) < size:
        _, _, token, parent, log_prob, own = heappop(heap)
        push(tree.add(parent, token, log_prob), own)


def open_store(store: str | Path, target: Target) -> Datastore:
    """The datastore at `store`; if empty, `drafters/rest.store` beside the target's weights.

    Raises `DrafterError` if there is none (`MissingDrafterError`), if it is damaged, or if it was built for
    another tokenizer.
    """
    beside = drafters_beside(target)
    if store:
        path = user_path(store)
    elif beside is not None:
        path = beside / "rest.store"
    else:
        raise MissingDrafterError(
            "no store is named for rest, and the target has no directory to look in: write rest(store=...); "
            "'soothsay datastore build MODEL FILES... --out FILE' makes one"
        )
    if not path.is_file():
        raise MissingDrafterError(
            f"there is no datastore at {path}: build one with 'soothsay datastore build "
            f"{target.path or 'MODEL'} FILES... --out {path}', or name one, rest(store=...)"
        )
    opened = Datastore(path)
    check_tokenizer(opened, target.tokenizer, str(target.path or "the target"))
    if opened.largest >= target.model.spec.vocab_size:
        raise DrafterError(
            f"{path} has token {opened.largest}, and the target only tokens below "
            f"{target.model.spec.vocab_size}: build a datastore for it"
        )
    return opened
