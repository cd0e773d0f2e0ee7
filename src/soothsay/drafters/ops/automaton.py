"""A suffix automaton: it reads texts, and finds the longest string that it has read.

`Automaton` and `Matcher` say what its users see. The classes in Python are the reference of the native ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.continuations import WIDEST, Followers, KnownNoise, Source, grow_continuations

ROOT = 0

Tokens = npt.NDArray[np.int64]

Place = tuple[int, int]
"""A string in an automaton: its state and its length in tokens."""

NOWHERE: Place = (ROOT, 0)
"""The empty string."""


class Reading(Structure):
    """How far an automaton has read a text: `soothsay_reading` of csrc/kernels.h. It begins at the root.

    Attributes:
        end: the state of the whole text. Its link is the longest suffix that occurs elsewhere.
        counted: the state of the longest suffix whose occurrences are counted.
    """

    _fields_ = (("end", c_int), ("counted", c_int))


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


class StockAutomaton:
    """An `Automaton` of Python lists and dictionaries.

    State `s` stands for suffixes of one string. The longest has `length[s]` tokens, the shortest one token
    more than `length[link[s]]`. State `link[s]` has the shorter suffixes, which occur elsewhere too.

    Attributes:
        next: for each state, token -> the state after it.
        link: for each state, the state of the longest suffix that is not in it; -1 for the root.
        length: for each state, the length of its longest string.
        count: for each state, its occurrences.
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

    def matcher(self, doubt: float) -> StockMatcher:
        """See `Automaton`."""
        return StockMatcher(self, doubt)

    def follow(self, place: Place, tokens: Tokens) -> Place:
        """The longest known suffix of a string with `tokens` appended.

        Args:
            place: the longest known suffix of the string. The automaton may have read more texts since.
            tokens: what follows the string.
        """
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
        """The longest suffix of a text that also occurs elsewhere."""
        if text.end == ROOT:
            return NOWHERE
        state = self.short(self.link[text.end], self.counted - 1)
        return state, min(self.length[state], self.counted - 1)

    def short(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a string in `state`."""
        link, lengths = self.link, self.length
        while state and lengths[link[state]] >= length:
            state = link[state]
        return state

    def _extend(self, end: int, token: int) -> int:
        """The state of the string in `end` with `token` appended."""
        after, link, length = self.next, self.link, self.length
        known = after[end].get(token)
        if known is not None:  # another text has the same beginning
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
        """Move the strings of `end` and `token` from `known` into a state of their own.

        From now on they occur more often than the longer strings of `known`.
        """
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


class StockMatcher:
    """A `Matcher` of `StockAutomaton`s."""

    __slots__ = ("_own", "_places", "_reading", "longest")

    def __init__(self, own: StockAutomaton, doubt: float):
        self._own, self._reading = own, Reading()
        self._places: dict[StockAutomaton, tuple[float, Place]] = {own: (doubt, NOWHERE)}
        self.longest = 0

    def watch(self, others: Sequence[tuple[Automaton, float]], end: Tokens) -> None:
        """See `Matcher`."""
        before, self._places = self._places, {self._own: self._places[self._own]}
        for automaton, doubt in others:
            assert isinstance(automaton, StockAutomaton)
            known = before.get(automaton)
            self._places[automaton] = known or (doubt, automaton.follow(NOWHERE, end))
        self._measure()

    def read(self, tokens: Tokens) -> None:
        """See `Matcher`."""
        self._own.read(self._reading, tokens)
        for automaton, (doubt, place) in self._places.items():
            own = automaton is self._own
            now = automaton.repeated(self._reading) if own else automaton.follow(place, tokens)
            self._places[automaton] = doubt, now
        self._measure()

    def grow(self, tree: DraftTree, nodes: int, depth: int, noise: KnownNoise | None = None) -> None:
        """See `Matcher`."""
        none = np.empty(0, dtype=np.int64)
        places = [(one, doubt, one.follow(place, none)) for one, (doubt, place) in self._places.items()]
        starts = [(Occurrences(one, doubt), place) for one, doubt, place in places if place != NOWHERE]
        grow_continuations(tree, starts, nodes, depth, noise)

    def _measure(self) -> None:
        self.longest = max(length for _, (_, length) in self._places.values())


class Occurrences(Source[Place]):
    """The texts of a `StockAutomaton` as contexts of any length."""

    __slots__ = ("automaton", "doubt")

    def __init__(self, automaton: StockAutomaton, doubt: float):
        self.automaton, self.doubt = automaton, doubt

    def followers(self, context: Place) -> Followers:
        """The followers of a match. The doubt falls with its length."""
        state, length = context
        after, count = self.automaton.next[state], self.automaton.count
        counts = [(token, count[then]) for token, then in islice(after.items(), WIDEST)]
        total = sum([c for _, c in counts]) if len(after) <= WIDEST else count[state]
        return Followers(counts, total, len(after), self.doubt / (self.doubt + length))

    def shorter(self, context: Place) -> Place | None:
        """The longest suffix of a match that also occurs elsewhere."""
        state = self.automaton.link[context[0]]
        return (state, self.automaton.length[state]) if state > ROOT else None

    def after(self, context: Place, token: int) -> Place:
        """The match with one more token."""
        length = min(context[1] + 1, self.automaton.counted - 1)
        return self.automaton.short(self.automaton.next[context[0]][token], length), length
