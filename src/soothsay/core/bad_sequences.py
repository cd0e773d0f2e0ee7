"""Sequences of tokens that an answer must not contain."""

from collections.abc import Iterable, Sequence


class BadSequences:
    """Finds the tokens that would complete one of some sequences.

    The sequences are kept by what comes before their last token. So a position costs one look-up for each
    length, however many sequences there are.

    Example:
        >>> BadSequences([(1, 2, 3), (1, 2, 4), (5,)]).after([0, 1, 2])
        [5, 3, 4]
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]):
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *begin, last in dict.fromkeys(sequences):
            self._last.setdefault(tuple(begin), []).append(last)
        self._lengths = sorted({len(begin) for begin in self._last})

    @property
    def reach(self) -> int:
        """Number of tokens before the next one that matter, at most."""
        return max(self._lengths, default=0)

    def after(self, said: Sequence[int]) -> list[int]:
        """The tokens that must not follow the tokens of an answer."""
        begins = (tuple(said[len(said) - length :]) for length in self._lengths if length <= len(said))
        return [token for begin in begins for token in self._last.get(begin, ())]
