"""A drafter that stands in for another one, for code that counts or times what a drafter does."""

from __future__ import annotations

from typing import Any

from soothsay.drafters.base import Drafter


class _Forwarded:
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

    taps: Any = _Forwarded()
    max_nodes: Any = _Forwarded()
    trained: Any = _Forwarded()
    likely_gain: Any = _Forwarded()
    decisions: Any = _Forwarded()
    name: Any = _Forwarded()
    propose: Any = _Forwarded()
    observe: Any = _Forwarded()
    authors: Any = _Forwarded()
    num_known: Any = _Forwarded()
    release: Any = _Forwarded()
    reset: Any = _Forwarded()
    study: Any = _Forwarded()
    learned: Any = _Forwarded()

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
