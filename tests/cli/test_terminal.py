"""Progress of long work: bars in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from soothsay import LLM
from soothsay.cli import terminal
from soothsay.progress import progress_shown_by, tell_progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


def test_a_line_a_minute_where_there_is_no_terminal(clock: Clock) -> None:
    written = io.StringIO()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with terminal.bars(*columns, console=Console(file=written, width=20)) as bars:
        task = bars.add_task("answering many prompts", total=100, rate="")
        for done in range(1, 11):  # one each quarter of a minute
            bars.update(task, completed=done, rate=f"{done} tokens/s")
            clock.now += 15
    assert written.getvalue().splitlines() == [
        "answering many prompts   5/100 5 tokens/s",
        "answering many prompts   9/100 9 tokens/s",
    ]


@pytest.mark.parametrize(
    ("limit", "left"), [(float("inf"), ["0:02:50", "0:01:50"]), (150, ["0:01:20", "0:00:20"])]
)
def test_a_line_has_the_rate_and_the_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str], limit: float, left: list[str]
) -> None:
    with terminal.progress_bar("answering", limit=limit) as progress:
        for done in range(14):
            progress(done, 24, 60 * done)
            clock.now += 10
    shown = zip((7, 13), left, strict=True)
    assert capsys.readouterr().err.splitlines() == [
        f"answering {done}/24 answers, 6 tokens/s, {time} left" for done, time in shown
    ]


def test_steps_that_take_minutes_have_a_time_left() -> None:
    written, now = io.StringIO(), [0.0]
    with terminal.bars(TimeRemainingColumn(), console=Console(file=written, get_time=lambda: now[0])) as bars:
        task = bars.add_task("", total=10)
        for done in range(1, 4):
            now[0] += 100
            bars.update(task, completed=done)
        assert bars.tasks[0].time_remaining == 700


def test_a_speed_is_shown_once_an_item_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=written, force_terminal=True, width=99))
    with terminal.progress_bar("answering", paced=True) as tell:
        for done, shown in ((0, False), (1, True)):
            tell(done, 9, 50 * done)
            time.sleep(0.3)
            assert f"{done}/9 answers," in written.getvalue()
            assert ("tokens/s" in written.getvalue()) is shown


def test_short_work_writes_nothing(clock: Clock) -> None:
    written = io.StringIO()
    with terminal.bars(MofNCompleteColumn(), console=Console(file=written)) as bars:
        task = bars.add_task("", total=100)
        for done in range(100):
            bars.update(task, completed=done)
            clock.now += 0.5
    assert not written.getvalue()


def test_hidden_stages_write_nothing(clock: Clock) -> None:
    written = io.StringIO()
    with terminal.bars(TextColumn("{task.description}"), console=Console(file=written)) as bars:
        hidden, shown = (
            bars.add_task(name, total=9, visible=name == "shown") for name in ("hidden", "shown")
        )
        for _ in range(3):
            bars.update(hidden, completed=1)
            bars.update(shown, completed=1)
            clock.now += 61
    assert written.getvalue().splitlines() == ["shown", "shown"]


def wait_for(shown: str, written: io.StringIO) -> None:
    """Wait until a text was written."""
    for _ in range(1000):
        if shown in written.getvalue():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{shown!r} is not in {written.getvalue()!r}")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to a terminal."""
    file = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=file, force_terminal=True, width=80))
    return file


def test_loading_that_takes_long_has_a_bar(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", 0)
    with terminal.load_bar("loading it ..."):
        assert "loading it ..." in written.getvalue()
        wait_for("loading libraries", written)
        tell_progress("packing", 3, 9)
        wait_for("packing", written)
        wait_for("3/9", written)
    before = written.getvalue()
    tell_progress("packing", 4, 9)
    assert written.getvalue() == before


def test_loading_that_is_soon_done_has_a_notice(written: io.StringIO) -> None:
    with terminal.load_bar("loading it ..."):
        tell_progress("packing", 3, 9)
    assert "loading it ..." in written.getvalue()
    assert "packing" not in written.getvalue()


def test_loading_writes_nothing_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", 0)
    with terminal.load_bar("loading it ..."):
        tell_progress("packing", 3, 9)
    assert capsys.readouterr() == ("", "")


def test_a_model_says_what_it_does_while_it_loads() -> None:
    told = list[tuple[str, int, int]]()
    with progress_shown_by(lambda *told_now: told.append(told_now)):
        LLM("sibyl", drafter="none", max_requests=1)
    parts = [(done, total) for what, done, total in told if what == "reading and packing weights"]
    assert parts == [(done, len(parts)) for done in range(len(parts))]
    assert len(parts) > 8
