"""A drafter that stands in for another one, for code that counts or times what a drafter does."""

from __future__ import annotations

from typing import Any

from soothsay.drafters.base import Drafter


class _PassedOn:
    """An attribute or a method of the wrapped drafter."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, proxy: DrafterProxy | None, owner: type) -> Any:
        return self if proxy is None else getattr(proxy.drafter, self.name)

    def __set__(self, proxy: DrafterProxy, value: object) -> None:
        setattr(proxy.drafter, self.name, value)


class DrafterProxy(Drafter):
    """Passes every member of the protocol on to `drafter`.

    A subclass overrides the methods that it watches, and calls `self.drafter` in them. The engine cannot tell
    a proxy from its drafter: it reads the same `taps` and `trained`, and names the same authors.
    """

    taps: Any = _PassedOn()
    max_nodes: Any = _PassedOn()
    trained: Any = _PassedOn()
    likely_gain: Any = _PassedOn()
    name: Any = _PassedOn()
    propose: Any = _PassedOn()
    observe: Any = _PassedOn()
    authors: Any = _PassedOn()
    num_known: Any = _PassedOn()
    release: Any = _PassedOn()
    reset: Any = _PassedOn()
    study: Any = _PassedOn()
    learned: Any = _PassedOn()

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
