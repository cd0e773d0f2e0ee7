"""The suffix automaton in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int, c_void_p

from soothsay.core.noise import LOW_64_BITS
from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.automaton import Automaton, KnownNoise, Reading, Tokens
from soothsay.drafters.ops.continuations import LEAST, WIDEST


class _Reading(Structure):
    """`soothsay_reading` of csrc/kernels.h."""

    _fields_ = (("end", c_int), ("counted", c_int))


_NO_NOISE = False, 0, 0, 0.0, 0.0


class NativeAutomaton:
    """An `Automaton` in a library's memory: 90 to 135 bytes for each token that it has read.

    Args:
        library: an open library.
        counted: see `Automaton`.
    """

    __slots__ = ("_handle", "_library", "counted", "size")

    def __init__(self, library: ctypes.CDLL, counted: int):
        self.counted, self.size = counted, 0
        self._library = library
        self._handle: int = library.soothsay_automaton_new(counted)

    def __del__(self) -> None:
        self._library.soothsay_automaton_free(self._handle)

    def read(self, text: Reading, tokens: Tokens) -> None:
        """See `Automaton`."""
        state = _Reading(text.end, text.counted)
        self._library.soothsay_automaton_read(self._handle, byref(state), tokens.tobytes(), len(tokens))
        text.end, text.counted = state.end, state.counted
        self.size += len(tokens)

    def matcher(self, doubt: float) -> NativeMatcher:
        """See `Automaton`."""
        return NativeMatcher(self, doubt)


class NativeMatcher:
    """A `Matcher` in a library's memory.

    Args:
        own: reads its text.
        doubt: see `Matcher.watch`.
    """

    __slots__ = ("_handle", "_library", "_others", "_own", "longest")

    def __init__(self, own: NativeAutomaton, doubt: float):
        self._own, self._library = own, own._library
        self._others: list[NativeAutomaton] = []  # alive while they are watched
        self._handle: int = self._library.soothsay_matcher_new(own._handle, doubt)
        self.longest = 0

    def __del__(self) -> None:
        self._library.soothsay_matcher_free(self._handle)

    def watch(self, others: Sequence[tuple[Automaton, float]], end: Tokens) -> None:
        """See `Matcher`."""
        automata, count = [one for one, _ in others if isinstance(one, NativeAutomaton)], len(others)
        assert len(automata) == count
        self.longest = self._library.soothsay_matcher_watch(
            self._handle,
            (c_void_p * count)(*[automaton._handle for automaton in automata]),
            (c_double * count)(*[doubt for _, doubt in others]),
            *(count, end.tobytes(), len(end)),
        )
        self._others = automata

    def read(self, tokens: Tokens) -> None:
        """See `Matcher`."""
        self.longest = self._library.soothsay_matcher_read(self._handle, tokens.tobytes(), len(tokens))
        self._own.size += len(tokens)

    def grow(self, tree: DraftTree, nodes: int, depth: int, noise: KnownNoise | None = None) -> None:
        """See `Matcher`."""
        tokens, parents, scores = (c_int * nodes)(), (c_int * nodes)(), (c_double * nodes)()
        size = self._library.soothsay_matcher_grow(
            *(self._handle, nodes, depth, WIDEST, LEAST),
            *(_NO_NOISE if noise is None else (True, noise.seed & LOW_64_BITS, *noise[1:])),
            *(tokens, parents, scores),
        )
        tree.append_nodes(tokens[1:size], parents[1:size], scores[1:size])
