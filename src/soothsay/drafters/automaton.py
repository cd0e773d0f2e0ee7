"""The suffix automaton: every string of tokens that was ever said, and how often, in one small machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from soothsay.drafters.backoff import LEAST, WIDEST, Followers, Source, grow
from soothsay.engine.tree import DraftTree
from soothsay.native import native_kernels

ROOT = 0

Tokens = npt.NDArray[np.int64]

Place = tuple[int, int]
"""A string in an automaton: a state, and how many tokens the string has."""

Start = tuple["Automaton", float, Place]
"""Where a tree begins: an automaton, the match length at which half of a lone occurrence is believed, and the
longest match of the text."""

NOWHERE: Place = (ROOT, 0)
"""The empty string."""


class Reading:
    """A text on its way into an automaton.

    Attributes:
        end: the state of the whole text. Its link is the longest suffix that occurs anywhere else.
        counted: the state of the longest suffix whose occurrences are counted.
    """

    __slots__ = ("counted", "end")

    def __init__(self) -> None:
        self.end = self.counted = ROOT


class Automaton(Protocol):
    """Recognises every substring of the texts it has read, token by token as they come.

    Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; of several texts, Mohri,
    Moreno and Weinstein 2009, "General suffix automaton construction algorithm and space bounds". Strings
    that end at the same places are one state; there are at most two states for each token. Reading a token
    takes amortized constant time.

    Attributes:
        counted: occurrences are counted of strings of at most so many tokens, since a token adds to each of
            its suffixes: in a text that repeats itself they are as many as it is long. Matches are shorter by
            one, so that what comes behind them is counted too.
        size: tokens that have been read.
    """

    counted: int
    size: int

    def read(self, text: Reading, tokens: Tokens) -> None:
        """Append tokens to a text. Texts may be read in turns."""

    def follow(self, place: Place, tokens: Tokens) -> Place:
        """The longest suffix of a string and these tokens that was read.

        Args:
            place: of that string's longest suffix; other texts may have been read since.
            tokens: behind it.
        """

    def repeated(self, text: Reading) -> Place:
        """The longest suffix of a text that occurs elsewhere too."""

    @staticmethod
    def grow(tree: DraftTree, starts: Sequence[Start], nodes: int, depth: int) -> None:
        """Add the likeliest of what came behind these matches, as `soothsay.drafters.backoff.grow` does.

        Args:
            tree: a root alone.
            starts: at least one; their automata are of this class.
            nodes: the tree's, the root included, at most.
            depth: guesses in a row, at most.
        """


def new_automaton(counted: int) -> Automaton:
    """An empty one, in C if there are native kernels."""
    kernels = native_kernels()
    return StockAutomaton(counted) if kernels is None else kernels.automaton(counted, WIDEST, LEAST)


class StockAutomaton:
    """An `Automaton` of Python's lists and dictionaries.

    State `s` stands for the suffixes of one string, from its longest, of `length[s]` tokens, down to those
    one token longer than `length[link[s]]`; `link[s]` goes on with the shorter ones, which occur elsewhere
    too.

    Attributes:
        next: of each state, token -> the state behind it.
        link: of each state, the one of the longest suffix that is not in it; -1 for the root.
        length: of each state, tokens of its longest string.
        count: of each state, its occurrences.
    """

    __slots__ = ("count", "counted", "length", "link", "next", "size")

    def __init__(self, counted: int):
        self.counted, self.size = counted, 0
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]

    def read(self, text: Reading, tokens: Tokens) -> None:
        """See `Automaton`."""
        count, link, end, counted = self.count, self.link, text.end, text.counted
        for token in tokens.tolist():
            end = self._extend(end, token)
            counted = self.short(self.next[counted][token], self.counted)
            state = counted
            while state > ROOT:
                count[state] += 1
                state = link[state]
        text.end, text.counted = end, counted
        self.size += len(tokens)

    def follow(self, place: Place, tokens: Tokens) -> Place:
        """See `Automaton`."""
        after, longest = self.next, self.counted - 1
        state, length = self.short(*place), place[1]
        for token in tokens.tolist():
            while state and token not in after[state]:
                state = self.link[state]
                length = self.length[state]
            if token in after[state]:
                length = min(length + 1, longest)
                state = self.short(after[state][token], length)
        return state, length

    def repeated(self, text: Reading) -> Place:
        """See `Automaton`."""
        if text.end == ROOT:
            return NOWHERE
        state = self.short(self.link[text.end], self.counted - 1)
        return state, min(self.length[state], self.counted - 1)

    @staticmethod
    def grow(tree: DraftTree, starts: Sequence[Start], nodes: int, depth: int) -> None:
        """See `Automaton`."""
        sources = [(Occurrences(automaton, doubt), place) for automaton, doubt, place in starts]
        grow(tree, sources, nodes, depth)

    def short(self, state: int, length: int) -> int:
        """The state of the suffix with `length` tokens of a string in `state`; `state` if it has no more."""
        link, lengths = self.link, self.length
        while state and lengths[link[state]] >= length:
            state = link[state]
        return state

    def _extend(self, end: int, token: int) -> int:
        """The state of the text in `end` and one more token."""
        after, link, length = self.next, self.link, self.length
        known = after[end].get(token)
        if known is not None:  # another text began alike
            return known if length[known] == length[end] + 1 else self._split(end, token, known)
        state = len(after)
        after.append({})
        length.append(length[end] + 1)
        self.count.append(0)
        link.append(ROOT)
        while end >= 0 and token not in after[end]:
            after[end][token] = state
            end = link[end]
        if end >= 0:
            known = after[end][token]
            link[state] = known if length[known] == length[end] + 1 else self._split(end, token, known)
        return state

    def _split(self, end: int, token: int, known: int) -> int:
        """Take the strings that end with `token` behind `end` out of `known`: from now on they occur more
        often than its longer ones."""
        after, link = self.next, self.link
        state = len(after)
        after.append(after[known].copy())
        self.length.append(self.length[end] + 1)
        self.count.append(self.count[known])
        link.append(link[known])
        link[known] = state
        while end >= 0 and after[end].get(token) == known:
            after[end][token] = state
            end = link[end]
        return state


class Occurrences(Source[Place]):
    """What a `StockAutomaton` has read, as contexts of any length."""

    __slots__ = ("automaton", "doubt")

    def __init__(self, automaton: Automaton, doubt: float):
        assert isinstance(automaton, StockAutomaton)
        self.automaton, self.doubt = automaton, doubt

    def followers(self, context: Place) -> Followers:
        """What came behind a match. The longer it is, the less is doubted."""
        state, length = context
        after, count = self.automaton.next[state], self.automaton.count
        counts = [(token, count[then]) for token, then in islice(after.items(), WIDEST)]
        total = sum([c for _, c in counts]) if len(after) <= WIDEST else count[state]
        return Followers(counts, total, len(after), self.doubt / (self.doubt + length))

    def shorter(self, context: Place) -> Place | None:
        """The longest suffix of a match that occurs elsewhere too."""
        state = self.automaton.link[context[0]]
        return (state, self.automaton.length[state]) if state > ROOT else None

    def behind(self, context: Place, token: int) -> Place:
        """The match and one token more."""
        length = min(context[1] + 1, self.automaton.counted - 1)
        return self.automaton.short(self.automaton.next[context[0]][token], length), length
