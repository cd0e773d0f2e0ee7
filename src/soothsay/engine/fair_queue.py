"""Places in the waiting line that are fair to all callers."""

from __future__ import annotations

from collections.abc import Hashable


class FairQueue:
    """Gives requests numbers, the lowest of which is served first: start-time fair queueing (Goyal, Vin and
    Cheng 1996).

    The requests of one caller have consecutive numbers. A caller who has none in the line begins with the
    number that is being served. So he waits for one request of each of the others, however many they have.
    """

    def __init__(self) -> None:
        self._served = 0
        self._next: dict[Hashable, int] = {}  # of callers whose next number is above the one being served

    def enter(self, caller: Hashable) -> int:
        """The number of a caller's new request."""
        number = max(self._next.get(caller, 0), self._served)
        self._next[caller] = number + 1
        return number

    def serve(self, number: int) -> None:
        """Begin with the request that has this number."""
        if number > self._served:
            self._served = number
            self._next = {caller: number for caller, number in self._next.items() if number > self._served}
