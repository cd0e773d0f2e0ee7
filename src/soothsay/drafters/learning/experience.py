"""What serving teaches: how the target's answers continue, and how far to believe a drafter or the counts."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from soothsay.core.arrays import FloatArray
from soothsay.core.tenant import State, check_kept, read_arrays
from soothsay.drafters.lookup.ngram import Counts, Tokens
from soothsay.drafters.ops.continuations import LEAST, WIDEST

ORDER = 5
"""n of the n-grams: contexts have up to 4 tokens."""

SILENT, SILENT_ON_IT = 0, 1
"""Bins of a source that says nothing about a context, and of one that knows the context but not the token."""

EDGES = (0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Probabilities between the further bins."""

BINS = 2 + len(EDGES) + 1

PRIOR = 12.0
"""Number of tokens that the expected rates count for in each bin."""

FADE = 2000.0
"""Number of tokens in a bin beyond which old ones fade, so that a change of topic is followed."""


class Opinion(NamedTuple):
    """What the drafter and the n-grams say of one token in one context, as bins."""

    drafter: int
    ngrams: int


def bin_of(probability: float) -> int:
    """The bin of a source that gives a token this probability, above 0."""
    return 2 + bisect_right(EDGES, probability)


class Trust:
    """How often a token was right, by what the drafter and the n-grams said of it.

    It begins with rates that believe both sources equally where both speak.
    """

    __slots__ = ("_rates", "right", "seen")

    def __init__(self) -> None:
        centers = [0.0, 0.0, *_centers()]
        self.seen = np.full((BINS, BINS), PRIOR)
        self.right = np.empty((BINS, BINS))
        for a in range(BINS):
            for b in range(BINS):
                both = a != SILENT and b != SILENT
                self.right[a, b] = PRIOR * (centers[a] + centers[b]) / (2 if both else 1)
        self._rates: list[list[float]] = (self.right / self.seen).tolist()

    def rate(self, opinion: Opinion) -> float:
        """The probability that a token is right."""
        return self._rates[opinion.drafter][opinion.ngrams]

    def record(self, opinion: Opinion, right: bool) -> None:
        """Count one token of a context whose continuation is known."""
        seen, hits = self.seen[opinion] + 1.0, self.right[opinion] + right
        if seen > FADE:
            hits *= FADE / seen
            seen = FADE
        self.seen[opinion], self.right[opinion] = seen, hits
        self._rates[opinion.drafter][opinion.ngrams] = float(hits / seen)

    def restore(self, seen: FloatArray, right: FloatArray) -> None:
        """Take over counts that have been checked."""
        self.seen, self.right = seen, right
        self._rates = (right / seen).tolist()


class Experience:
    """What a tenant's answers have taught.

    Args:
        memory: number of contexts to keep.
    """

    def __init__(self, memory: int):
        self.counts = Counts(ORDER, memory)
        self.trust = {False: Trust(), True: Trust()}  # by whether the request samples

    def continuations(self, context: Tokens) -> dict[int, float]:
        """The probabilities of the likeliest tokens after a context, by interpolated absolute discounting.

        Empty if the last token of the context was never followed by anything.
        """
        found: dict[int, float] = {}
        left = 1.0
        while context and left > LEAST:
            counts, total, distinct, doubt = self.counts.followers(context)
            if total:
                for token, count in counts:
                    found[token] = found.get(token, 0.0) + left * (count - doubt) / total
                left *= min(doubt * distinct / total, 1.0)
            context = context[1:]
        likely = sorted(found.items(), key=lambda one: -one[1])
        return {token: share for token, share in islice(likely, WIDEST) if share > LEAST}

    def merge(self, other: Experience) -> None:
        """Take over what another one has learned. A bin's rate is that of more tokens."""
        self.counts.merge(other.counts)
        for sampled, own in self.trust.items():
            theirs = other.trust[sampled]
            more = theirs.seen > own.seen
            own.restore(np.where(more, theirs.seen, own.seen), np.where(more, theirs.right, own.right))

    def state(self) -> State:
        """As arrays: those of the counts; `right` and `seen` `[2, BINS, BINS]` float64."""
        tables = [self.trust[sampled] for sampled in (False, True)]
        right, seen = np.stack([one.right for one in tables]), np.stack([one.seen for one in tables])
        return {**self.counts.state(), "right": right, "seen": seen}

    @classmethod
    def restored(cls, memory: int, state: State, vocab_size: int) -> Experience:
        """The inverse of `state`. Raises `DrafterError` if the arrays are impossible."""
        made = cls(memory)
        right, seen = read_arrays("learning", state, right=("float64", 3), seen=("float64", 3))
        check_kept("learning", right.shape == seen.shape == (2, BINS, BINS))
        possible = (right >= 0) & (right <= seen) & (seen >= 1) & (seen <= FADE)
        check_kept("learning", bool(possible.all()))  # false for NaN too
        made.counts = Counts.restored(ORDER, memory, state, vocab_size)
        for place, sampled in enumerate((False, True)):
            made.trust[sampled].restore(seen[place], right[place])
        return made


def _centers() -> list[float]:
    """The middle of each bin of probabilities, on a logarithmic scale."""
    borders = [EDGES[0] / 2, *EDGES, 1.0]
    return [math.sqrt(low * high) for low, high in pairwise(borders)]
