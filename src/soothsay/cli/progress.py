"""A progress bar for commands that generate answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(what: str, items: str = "answers") -> Iterator[Callable[[int, int, int], None]]:
    """Show a bar on stderr with tokens a second and the time left. Does nothing if stderr is no terminal.

    Yields a function of (items done, items in total, tokens so far). Call it once before the work begins, and
    then after each item.
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
