"""Progress bars on stderr, shown in a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft


def bars(*columns: ProgressColumn, console: Console | None = None, refresh: bool = True) -> Progress:
    """Bars with these columns, before any of them has begun. Shows nothing if the console is no terminal.

    `refresh` draws them from time to time, and otherwise only when they change.
    """
    console = console or Console(stderr=True)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, auto_refresh=refresh, disable=hidden)


@contextmanager
def progress_bar(
    what: str, items: str = "answers", *, paced: bool = False
) -> Iterator[Callable[[int, int, int], None]]:
    """Show a bar with tokens a second and the time left. `paced` shows the items a second too.

    Yields a function of (items done, items in total, tokens so far). Call it once before the work begins, and
    then after each item.
    """
    speeds = f"{{task.fields[pace]:.3g}} {items}/s, " if paced else ""
    done_so_far = f"{{task.completed}}/{{task.total}} {items}, {speeds}{{task.fields[rate]:.0f}} tokens/s,"
    with bars(
        *(TextColumn(what), BarColumn(), TextColumn(done_so_far), TimeLeft(), TextColumn("left"))
    ) as progress:
        begin, before = 0.0, 0

        def update(done: int, total: int, tokens: int) -> None:
            nonlocal begin, before
            if not progress.task_ids:
                begin, before = time.perf_counter(), done
                progress.add_task(what, total=total, completed=done, pace=0.0, rate=0.0)
                return
            seconds = time.perf_counter() - begin
            pace, rate = (done - before) / seconds, tokens / seconds
            progress.update(progress.task_ids[0], completed=done, total=total, pace=pace, rate=rate)

        yield update


@contextmanager
def work_bar(what: str, measure: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with a measure of the work and the time left. Yields a function of (done, in total)."""
    with bars(TextColumn(what), BarColumn(), measure, TimeLeft(), TextColumn("left")) as progress:
        bar = progress.add_task(what, total=0)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show the bar of the current stage. Yields a function of (stage, done, in total); 0: unknown."""
    stages: dict[str, TaskID] = {}
    with bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft()) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(stage, total=None)
            for other, bar in stages.items():
                progress.update(bar, visible=other == stage)
            progress.update(stages[stage], completed=done, total=total or None)

        yield update


@contextmanager
def answer_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for a known number of answers. Yields a function that counts one answer of some tokens."""
    done = tokens = 0
    with progress_bar(what) as update:
        update(done, total, tokens)

        def advance(num_tokens: int) -> None:
            nonlocal done, tokens
            done, tokens = done + 1, tokens + num_tokens
            update(done, total, tokens)

        yield advance
