"""Progress of long work: bars in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from soothsay.cli import terminal


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
