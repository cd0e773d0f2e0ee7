"""How long to wait before the engine is started again."""

from __future__ import annotations


class Backoff:
    """Waits of 0, then `first`, then twice as much each time, at most `longest` seconds.

    So an engine that dies once is back at once, and one that dies again and again takes little of the
    machine, but comes back by itself when the cause is gone.

    Example:
        >>> backoff = Backoff(1.0, 60.0)
        >>> [backoff.wait() for _ in range(9)]
        [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    """

    def __init__(self, first: float, longest: float):
        self._first, self._longest = first, longest
        self._next = 0.0

    def wait(self) -> float:
        """Seconds to wait this time."""
        seconds = self._next
        self._next = min(max(2 * seconds, self._first), self._longest)
        return seconds

    def reset(self) -> None:
        """Begin anew, because the engine was sound for long enough."""
        self._next = 0.0
