"""What long work says of its progress, to whoever shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ShowProgress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much it is in total; 0: nobody knows."""


class _Listener(threading.local):
    """Who shows what this thread does."""

    show: ShowProgress | None = None


_listener = _Listener()


def tell_progress(what: str, done: int = 0, total: int = 0) -> None:
    """Say how far the work of this thread is. Nobody hears it outside of `progress_shown_by`."""
    if _listener.show is not None:
        _listener.show(what, done, total)


@contextmanager
def progress_shown_by(show: ShowProgress) -> Iterator[None]:
    """Pass on what this thread tells while the block runs."""
    before, _listener.show = _listener.show, show
    try:
        yield
    finally:
        _listener.show = before
