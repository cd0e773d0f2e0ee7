"""The suffix automaton: every string of tokens that was ever said, and how often, in one small machine."""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0


class SuffixAutomaton:
    """Recognises every substring of the texts it has read, token by token as they come.

    Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; of several texts, Mohri,
    Moreno and Weinstein 2009, "General suffix automaton construction algorithm and space bounds". Strings
    that end at the same places are one state; there are at most two states for each token. Reading a token
    takes amortized constant time.

    State `s` stands for the suffixes of one string, from its longest, of `length[s]` tokens, down to those
    one token longer than `length[link[s]]`; `link[s]` goes on with the shorter ones, which occur elsewhere
    too.

    `count[s]` is how often these strings occur. It is kept only for strings of at most `counted` tokens,
    since a token adds to each of its suffixes: in a text that repeats itself they are as many as it is long.

    Args:
        counted: see above.

    Attributes:
        next: of each state, token -> the state behind it.
        link: of each state, the one of the longest suffix that is not in it; -1 for the root.
        length: of each state, tokens of its longest string.
        count: of each state, its occurrences.
        size: tokens that have been read.
    """

    __slots__ = ("count", "counted", "length", "link", "next", "size")

    def __init__(self, counted: int):
        self.counted = counted
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.size = 0

    def read(self, text: Reading, tokens: Sequence[int]) -> None:
        """Append tokens to a text. Texts may be read in turns."""
        count, link, end, counted = self.count, self.link, text.end, text.counted
        for token in tokens:
            end = self._extend(end, token)
            counted = self.short(self.next[counted][token], self.counted)
            state = counted
            while state > ROOT:
                count[state] += 1
                state = link[state]
        text.end, text.counted = end, counted
        self.size += len(tokens)

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


class Reading:
    """A text on its way into an automaton.

    Attributes:
        end: the state of the whole text. Its link is the longest suffix that occurs anywhere else.
        counted: the state of the longest suffix whose occurrences are counted.
    """

    __slots__ = ("counted", "end")

    def __init__(self) -> None:
        self.end = self.counted = ROOT


class Match:
    """The longest suffix of a text that an automaton knows, carried along token by token.

    Attributes:
        state: where it is.
        length: its tokens; at most one less than the longest strings that are counted.
    """

    __slots__ = ("_automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton):
        self._automaton = automaton
        self.state, self.length = ROOT, 0

    def read(self, tokens: Sequence[int]) -> None:
        """Go on with the text. The automaton may have read other texts since."""
        automaton = self._automaton
        after, longest = automaton.next, automaton.counted - 1
        state, length = automaton.short(self.state, self.length), self.length
        for token in tokens:
            while state and token not in after[state]:
                state = automaton.link[state]
                length = automaton.length[state]
            if token in after[state]:
                length = min(length + 1, longest)
                state = automaton.short(after[state][token], length)
        self.state, self.length = state, length
