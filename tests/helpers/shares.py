"""A pytest plugin that runs a share of the tests, in a limited time.

`--share 30/12` keeps the tests whose name's CRC-32 modulo 12 is 30 modulo 12. With `--minutes 5`, a test that
has no turn within five minutes, or does not end by then, is skipped.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import pytest

LATE = "no time left: another run may reach it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="NUMBER/PARTS",
        type=parse,
        help="run the tests of one part; NUMBER may be larger",
    )
    parser.addoption("--minutes", type=float, help="skip what does not end within this time")


def parse(text: str) -> tuple[int, int]:
    """Read a part's number and the number of parts."""
    number, parts = map(int, text.split("/"))
    return number % parts, parts


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("minutes") is not None:
        config.pluginmanager.register(Deadline(60 * config.getoption("minutes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("share")) is None:
        return
    number, parts = share
    others = [item for item in items if crc32(item.nodeid.encode()) % parts != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _cut(*_: object) -> None:
    """End the test that runs. What it leaves open is warned of as unraisable; that must not fail the run."""
    sys.unraisablehook = lambda _: None
    pytest.skip(LATE)


class Deadline:
    """Skips each part of a test that begins after some seconds, and ends one that runs then."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._limited():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self._limited():
            return (yield)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        left = self._end - time.monotonic()
        if left <= 0:
            pytest.skip(LATE)
        before = signal.signal(signal.SIGALRM, _cut)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
