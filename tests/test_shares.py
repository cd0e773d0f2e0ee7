"""The plugin of `shares.py`: each test has its turn in one share, and a run ends in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import shares

pytest_plugins = ["pytester"]


@pytest.fixture
def runs(pytester: pytest.Pytester) -> pytest.Pytester:
    """Runs of pytest in a folder of their own, with the plugins of this project."""
    folder = str(Path(shares.__file__).parent)
    pytester.makeconftest(
        f"import sys\n\nsys.path.insert(0, {folder!r})\npytest_plugins = ['skips', 'shares']\n"
    )
    return pytester


OPTIONS = ("-p", "no:cacheprovider", "--strict-skips")


def test_each_test_is_in_one_share(runs: pytest.Pytester) -> None:
    runs.makepyfile("import pytest\n\n@pytest.mark.parametrize('n', range(20))\ndef test_it(n):\n    pass")
    found: list[str] = []
    for number in range(6, 10):
        result = runs.runpytest_inprocess(*OPTIONS, "-v", "--share", f"{number}/4")
        assert result.ret == 0
        own = [line.split()[0] for line in result.outlines if "PASSED" in line]
        assert 0 < len(own) < 20
        result.assert_outcomes(passed=len(own), deselected=20 - len(own))
        found += own
    assert len({*found}) == len(found) == 20


FILE = """
import time
import pytest

class Open:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        raise ValueError("left open")

def late():
    left = Open()
    try:
        time.sleep(5)
    finally:
        del left  # else the records of this run would keep it
    pytest.fail()

@pytest.fixture
def slow():
    {setup}

def test_first():
    pass

def test_slow(slow):
    {call}

def test_last():
    pass
"""


@pytest.mark.parametrize(("setup", "call"), [("late()", "pass"), ("pass", "late()")])
def test_what_does_not_end_in_time_is_skipped(runs: pytest.Pytester, setup: str, call: str) -> None:
    runs.makepyfile(FILE.format(setup=setup, call=call))
    # in a process of its own: what the test leaves open must not be found later in this one
    result = runs.runpytest_subprocess(*OPTIONS, "-W", "error", "--minutes", str(1 / 60))
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines([f"*2  {shares.LATE}"])
