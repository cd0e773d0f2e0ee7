"""Prompt lookup: propose what followed earlier occurrences of the last tokens in the same request.

Saxena 2023 (prompt lookup decoding) and Yang et al. 2023 (LLMA, arXiv 2304.04487). It needs no model and no
training, and is strong if an answer repeats its prompt or itself: summaries, edits, retrieval, code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from soothsay.core.arrays import IntArray
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, Target
from soothsay.errors import DrafterError


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
