"""The suffix automaton in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int, c_void_p

from soothsay.core.automaton import Draws, Place, Reading, Start, Tokens
from soothsay.core.noise import LOW_64_BITS
from soothsay.core.tree import DraftTree


class _Pair(Structure):
    """`soothsay_reading` and `soothsay_place` of csrc/kernels.h."""

    _fields_ = (("first", c_int), ("second", c_int))


_NO_DRAWS = False, 0, 0, 0.0, 0.0


class NativeAutomaton:
    """An `Automaton` in a library's memory: 90 to 135 bytes for each token that it has read.

    Args:
        library: an open library.
        counted: see `Automaton`.
        widest: maximum number of followers of a match that a tree considers.
        least: minimum probability of a path in a tree.
    """

    __slots__ = ("_handle", "_library", "counted", "least", "size", "widest")

    def __init__(self, library: ctypes.CDLL, counted: int, widest: int, least: float):
        self.counted, self.size = counted, 0
        self.widest, self.least = widest, least
        self._library = library
        self._handle: int = library.soothsay_automaton_new(counted)

    def __del__(self) -> None:
        self._library.soothsay_automaton_free(self._handle)

    def read(self, text: Reading, tokens: Tokens) -> None:
        """See `Automaton`."""
        state = _Pair(text.end, text.counted)
        self._library.soothsay_automaton_read(self._handle, byref(state), tokens.tobytes(), len(tokens))
        text.end, text.counted = state.first, state.second
        self.size += len(tokens)

    def follow(self, place: Place, tokens: Tokens) -> Place:
        """See `Automaton`."""
        state = _Pair(*place)
        self._library.soothsay_automaton_follow(self._handle, byref(state), tokens.tobytes(), len(tokens))
        return state.first, state.second

    def repeated(self, text: Reading) -> Place:
        """See `Automaton`."""
        state, found = _Pair(text.end, text.counted), _Pair()
        self._library.soothsay_automaton_repeated(self._handle, byref(state), byref(found))
        return found.first, found.second

    @staticmethod
    def grow(
        tree: DraftTree, starts: Sequence[Start], nodes: int, depth: int, draws: Draws | None = None
    ) -> None:
        """See `Automaton`."""
        automata, doubts, places = zip(*starts, strict=True)
        one, count = automata[0], len(starts)
        assert isinstance(one, NativeAutomaton)
        tokens, parents, scores = (c_int * nodes)(), (c_int * nodes)(), (c_double * nodes)()
        size = one._library.soothsay_automaton_grow(
            (c_void_p * count)(*[automaton._handle for automaton in automata]),
            (_Pair * count)(*places),
            (c_double * count)(*doubts),
            *(count, nodes, depth, one.widest, one.least),
            *(_NO_DRAWS if draws is None else (True, draws.seed & LOW_64_BITS, *draws[1:])),
            *(tokens, parents, scores),
        )
        tree.hang(tokens[1:size], parents[1:size], scores[1:size])
