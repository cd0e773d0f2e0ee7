"""Finds the merges of a BPE tokenizer whose file has the tokens and their order only.

GGUF files, SentencePiece and tekken are such.
A token of n characters can be cut in n - 1 places. A vocabulary of 262,000 tokens has 1.2 million such cuts,
too many for a loop in Python, so numpy compares hashes of all parts at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from soothsay.errors import ModelError

MAX_TOKEN = 1024
"""Limit of a token's text in characters."""

MAX_CHARACTERS = 2**23
"""Limit of all tokens' texts together, in characters: finding merges takes up to 200 bytes for each.
Gemma's have 1.5 million."""

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64

_Numbers = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]


def check_lengths(tokens: Iterable[str]) -> None:
    """Raise `ModelError` for tokens that are too long, alone or together."""
    lengths = [*map(len, tokens)]
    if max(lengths, default=0) > MAX_TOKEN:
        raise ModelError(f"a token has {max(lengths):,} characters, and {MAX_TOKEN:,} is the limit")
    if sum(lengths) > MAX_CHARACTERS:
        raise ModelError(
            f"the tokens have {sum(lengths):,} characters together, and {MAX_CHARACTERS:,} is the limit"
        )


class Merges(Sequence[tuple[str, str]]):
    """All pairs of `tokens` that make another of them, in the order of the tokens that they make.

    A sequence that makes a pair when it is asked for: a million tuples would keep the garbage collector busy.

    Finding them takes 75 to 200 bytes of memory for each character. Texts with the same hash of 64 bits are
    taken for equal. By chance one vocabulary of Gemma's size in 50 million has two of them.

    Args:
        tokens: different texts, none empty.

    Example:
        >>> list(Merges(["abc", "ab", "a", "b", "bc", "c"]))
        [('a', 'bc'), ('ab', 'c'), ('a', 'b'), ('b', 'c')]
    """

    def __init__(self, tokens: Sequence[str]):
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        parts = _Parts("".join(tokens))
        index = _Index(parts.hashes(starts, ends))

        inside = np.ones(int(lengths.sum()), bool)
        inside[starts] = False
        cuts = np.flatnonzero(inside)  # places in the joined text where a token can be cut in two
        owner = np.repeat(np.arange(len(tokens)), lengths - 1)  # the token at each cut
        left, is_token = index.find(parts.hashes(starts[owner], cuts))
        left, cuts, owner = left[is_token], cuts[is_token], owner[is_token]
        right, is_token = index.find(parts.hashes(cuts, ends[owner]))
        self._tokens, self._left, self._right = tokens, left[is_token].tolist(), right[is_token].tolist()

    def __len__(self) -> int:
        return len(self._left)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._tokens[self._left[index]], self._tokens[self._right[index]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        token = self._tokens.__getitem__
        return zip(map(token, self._left), map(token, self._right), strict=True)


class _Parts:
    """Hashes of any parts of a text: sum of c_i B^(i - start) modulo 2^64, with characters c and base B.

    Characters count from 1, so that a NUL at the end makes a difference.
    """

    def __init__(self, text: str):
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
        self._sums: _Hashes = np.zeros(len(codes) + 1, np.uint64)  # of c_i B^(i + 1), before each place
        np.cumsum(codes * _powers(_BASE, len(codes)), out=self._sums[1:])
        self._inverses = _powers(pow(_BASE, -1, 2**64), len(codes) + 1)  # B^-(i + 1)

    def hashes(self, starts: _Numbers, ends: _Numbers) -> _Hashes:
        """One hash for each pair of a start and an end."""
        return (self._sums[ends] - self._sums[starts]) * self._inverses[starts]


def _powers(base: int, count: int) -> _Hashes:
    """`base` to the powers 1 to `count`, modulo 2^64."""
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)


class _Index:
    """Finds the places of hashes in a list of `hashes`."""

    def __init__(self, hashes: _Hashes):
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]

    def find(self, hashes: _Hashes) -> tuple[_Numbers, npt.NDArray[np.bool_]]:
        """The place of each hash, and whether it has one. Without one the place is arbitrary."""
        order = np.argsort(hashes)  # searching in ascending order reads memory in order, 5 times as fast
        found = np.empty(len(hashes), np.int64)
        found[order] = np.searchsorted(self._sorted, hashes[order])
        found = np.minimum(found, len(self._sorted) - 1)
        return self._order[found], self._sorted[found] == hashes
