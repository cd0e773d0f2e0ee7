"""A suffix automaton as its users see it: it reads texts, and finds the longest string that it has read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from soothsay.core.noise import exponential, noise_key
from soothsay.core.tree import DraftTree

ROOT = 0

Tokens = npt.NDArray[np.int64]

Place = tuple[int, int]
"""A string in an automaton: its state and its length in tokens."""

NOWHERE: Place = (ROOT, 0)
"""The empty string."""


class KnownNoise(NamedTuple):
    """The noise of the draws that a tree guesses. It says which guess will win.

    Attributes:
        seed: of the request.
        first: position of the first of these tokens.
        odds: against a guess whose noise is 0, in units of what its share of the counts says.
        weight: how much the noise counts: 1 if the share were the target's probability, 0 if the share said
            nothing about it.
    """

    seed: int
    first: int
    odds: float
    weight: float

    def probability(self, share: float, level: int, token: int) -> float:
        """How likely the target is to draw a token that has this share of the counts, below 1."""
        wait = exponential(noise_key(self.seed, self.first + level), token)
        against = self.odds * math.pow(wait, self.weight)
        return share / (share + (1.0 - share) * against)


class Reading:
    """How far an automaton has read a text.

    Attributes:
        end: the state of the whole text. Its link is the longest suffix that occurs elsewhere.
        counted: the state of the longest suffix whose occurrences are counted.
    """

    __slots__ = ("counted", "end")

    def __init__(self) -> None:
        self.end = self.counted = ROOT


class Automaton(Protocol):
    """Recognises every substring of the texts that it has read, and counts the occurrences of short ones.

    It reads token by token, in amortized constant time. Strings that end at the same places share a state;
    there are at most two states for each token. Blumer et al. 1985, "The smallest automaton recognizing the
    subwords of a text"; for several texts, Mohri, Moreno and Weinstein 2009, "General suffix automaton
    construction algorithm and space bounds".

    Attributes:
        counted: length of the longest strings whose occurrences are counted, in tokens. A limit is needed,
            since each token adds an occurrence to all suffixes of its text. A match has at most
            `counted - 1` tokens, so that its followers are counted too.
        size: tokens that have been read.
    """

    counted: int
    size: int

    def read(self, text: Reading, tokens: Tokens) -> None:
        """Append tokens to a text. Texts may be read in turns."""

    def matcher(self, doubt: float) -> Matcher:
        """A matcher of a text that this automaton reads. `doubt` is as in `Matcher.watch`."""


class Matcher(Protocol):
    """The longest matches of a growing text's end: in the text itself, and in other automata.

    Attributes:
        longest: length of the longest match in tokens; 0: there is none.
    """

    longest: int

    def watch(self, others: Sequence[tuple[Automaton, float]], end: Tokens) -> None:
        """Look for matches in these other automata, and in no more.

        Args:
            others: of the same class, each with a match length. At this length, half of a lone occurrence is
                believed. They may read texts later. A match in one that was watched before goes on.
            end: the last tokens of the text; as many as a match can have, if there are.
        """

    def read(self, tokens: Tokens) -> None:
        """Append tokens to the text."""

    def grow(self, tree: DraftTree, nodes: int, depth: int, noise: KnownNoise | None = None) -> None:
        """Add the likeliest followers of the matches, as `continuations.grow_continuations` does.

        Args:
            tree: has only its root.
            nodes: maximum size of the tree, the root included.
            depth: maximum depth of the tree.
            noise: of the tokens; None: their noise is not known, or there is none.
        """
