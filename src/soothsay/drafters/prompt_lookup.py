"""Prompt lookup: what followed the last time these words were said?

Saxena 2023 (prompt lookup decoding) and Yang et al. 2023 (LLMA, arXiv 2304.04487). No model, no training;
strong wherever the answer repeats its prompt or itself: summaries, edits, retrieval, code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from soothsay.drafters.base import Drafter, Target
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError


class PromptLookup(Drafter):
    """Finds earlier places where the last tokens stood, and proposes what came after.

    The longest matches go first, of equal ones the latest; several continuations merge into one trie. There
    is no
    state: one pass over the request's own tokens, vectorized, is faster than keeping an index in step.

    Args:
        target: the model to draft for.
        max_ngram: the longest match that is looked for, in tokens.
        min_ngram: the shortest that counts.
        num_tokens: tokens proposed after a match.
        num_matches: matches, at most, that are merged into the trie.
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
        """A trie of continuations for each request; the root alone where nothing matches."""
        return [
            self._propose(request.tokens, min(self.num_tokens, request.max_depth)) for request in requests
        ]

    def _propose(self, tokens: npt.NDArray[np.int64], depth: int) -> DraftTree:
        tree = DraftTree(int(tokens[-1]))
        if depth < 1:
            return tree
        for end, length in find_matches(tokens, self.max_ngram, self.min_ngram)[: self.num_matches]:
            # the share of right guesses grows with the match; 0.9 after eight tokens is typical
            tree.extend(tokens[end : end + depth].tolist(), log_prob=math.log((length + 1) / (length + 2)))
        return tree


def find_matches(tokens: npt.NDArray[np.int64], longest: int, shortest: int) -> list[tuple[int, int]]:
    """Earlier occurrences of the last tokens.

    Returns:
        Pairs (index behind the occurrence, its length), longest first, then latest. Lengths are capped at
        `longest`, and those below `shortest` left out.

    Example:
        >>> find_matches(np.array([1, 2, 3, 9, 2, 3, 1, 2, 3]), 3, 1)
        [(3, 3), (6, 2)]
    """
    size = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # an occurrence of the last token ends before these
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
