"""A bar while answers are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(what: str, items: str = "answers") -> Iterator[Callable[[int, int, int], None]]:
    """A bar on stderr, with the rate and the time left; only a terminal sees it.

    What it yields is called with the items that are done, how many there are, and the tokens made so far; the
    first time before anything is made.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {items}, {{task.fields[rate]:.0f}} tokens/s,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        begin = 0.0

        def update(done: int, total: int, tokens: int) -> None:
            nonlocal begin
            if not progress.task_ids:
                begin = time.perf_counter()
                progress.add_task(what, total=total, completed=done, rate=0.0)
                return
            rate = tokens / (time.perf_counter() - begin)
            progress.update(progress.task_ids[0], completed=done, total=total, rate=rate)

        yield update
