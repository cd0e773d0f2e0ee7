"""Output that several commands share: errors, notices, statistics and progress bars. Also loads models."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from soothsay.errors import DrafterError
from soothsay.options import BUNDLED, build_llm, check_room
from soothsay.progress import ShowProgress, progress_shown_by

if TYPE_CHECKING:
    from soothsay.core.answer import SpeculationStats
    from soothsay.drafters.base import Drafter, Target
    from soothsay.llm import LLM


ACCEPTED = "green"
"""The style of accepted draft tokens."""

PLAIN = "none"
"""The drafter that proposes nothing."""


CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): "",
}
"""Control characters, and what a terminal shows in their place. Line ends and tabs stay."""


def harmless(text: str) -> str:
    """A text from an untrusted source, such as a model, without characters that control a terminal."""
    return text.translate(CONTROLS)


def report(error: Exception) -> None:
    """Print an error as one line on stderr, in the form of those about options."""
    _say("Error: ", "bold red", str(error))


def warn(message: Warning | str, *_: object) -> None:
    """Print a warning as one line on stderr. Takes the place of `warnings.showwarning`."""
    _say("Warning: ", "yellow", str(message))


def _say(kind: str, style: str, text: str) -> None:
    say(Text.assemble((kind, style), harmless(" ".join(text.split()))), stderr=True)


def say(*parts: RenderableType, stderr: bool = False, style: str | None = None) -> None:
    """Print texts as they are, and tables, one below the other. The terminal breaks long lines."""
    console = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    console.print(*parts, sep="\n", style=style)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Show a dim line on stderr while the body runs. Does nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    console.print(Text(text, "dim"), end="\r", soft_wrap=True)
    try:
        yield
    finally:
        console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def load_llm(model: str, **options: Any) -> LLM:
    """`build_llm`: it decodes plainly and serves one request at a time, unless `options` say otherwise."""
    check_room(options.get("kv_memory"), options.get("device", "auto"))
    with load_bar(f"loading {model} ..."):
        return build_llm(model, **{"drafter": PLAIN, "max_requests": 1, **options})


def tell_bundled(given: str | None, other: str = "--model smollm2") -> None:
    """Say on stderr what the bundled model is, if no model was `given`. `other` names a useful one."""
    if given is None:
        text = f"no model is named: this is {BUNDLED}, a tiny one for demonstrations; a useful one: {other}"
        say(text, stderr=True, style="dim")


def sampling_summary(sampling: Mapping[str, float]) -> str:
    """Sampling parameters in one line, such as "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def summary(stats: SpeculationStats, seconds: float) -> str:
    """The speed of an answer in one line. Tokens a step include the bonus token."""
    rate = stats.emitted / seconds if seconds else 0.0
    return (
        f"{stats.emitted} tokens in {seconds:.2f} s, {rate:.0f} tokens/s; "
        f"{stats.steps} steps, {stats.mean_accepted:.2f} tokens a step"
    )


def acceptance_summary(stats: SpeculationStats) -> str:
    """The share of accepted draft tokens by depth, and their number by drafter."""
    if not stats.drafted:
        return "nothing was drafted"
    shares = " ".join(f"{share:.0%}" for share in stats.acceptance)
    own = ", ".join(f"{name} {sum(counts)}" for name, counts in stats.accepted_by.items())
    return f"accepted by depth: {shares}" + (f"; by drafter: {own}" if own else "")


LINE_EVERY = 60.0
"""Seconds between two lines on long work where the output is no terminal."""

PACE_OVER = 600.0
"""Seconds of work that the time left is reckoned from. A step, or an evaluation, can take minutes."""


class _Lines(Progress):
    """Bars as lines of text, one a minute, for logs. Work that is done within a minute has none."""

    _due = 0.0

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        super().update(task_id, *args, **changes)
        task = self.tasks[self.task_ids.index(task_id)]
        now, self._due = time.perf_counter(), self._due or time.perf_counter() + LINE_EVERY
        if now >= self._due and task.visible:
            self._due = now + LINE_EVERY
            shown = (column(task) for column in self.columns if isinstance(column, ProgressColumn))
            self.console.print(
                " ".join(str(part) for part in shown if isinstance(part, Text)), soft_wrap=True
            )


def bars(*columns: ProgressColumn, console: Console | None = None, refresh: bool = True) -> Progress:
    """Bars with these columns, before any of them has begun; lines of text if the console is no terminal.

    `refresh` draws them from time to time, and otherwise only when they change.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        return Progress(
            *columns,
            console=console,
            auto_refresh=refresh,
            speed_estimate_period=PACE_OVER,
            transient=True,
        )
    return _Lines(*columns, console=console, speed_estimate_period=PACE_OVER, disable=True)


@contextmanager
def progress_bar(
    what: str,
    items: str = "answers",
    *,
    paced: bool = False,
    loading: str = "",
    resumes: bool = False,
    limit: float = math.inf,
) -> Iterator[Callable[[int, int, int], None]]:
    """Show a bar with the time left, and tokens a second once an item is done. `paced`: items a second too.

    `loading` says what happens until the work begins; see `load_bar`. If the same command `resumes` the work,
    Ctrl-C says how far it came. Work that is not done after `limit` seconds is left out.

    Yields a function of (items done, items in total, tokens so far). Call it once before the work begins, and
    then after each item.
    """
    so_far = f"{{task.completed}}/{{task.total}} {items},{{task.fields[speeds]}} {{task.fields[left]}} left"
    progress = bars(TextColumn(what), BarColumn(), TextColumn(so_far))
    with ExitStack() as shown:
        if loading:
            shown.enter_context(load_bar(loading))
        begin, before = 0.0, 0

        def update(done: int, total: int, tokens: int) -> None:
            nonlocal begin, before
            if not progress.task_ids:
                shown.close()
                shown.enter_context(progress)
                begin, before = time.perf_counter(), done
                progress.add_task(what, total=total, completed=done, speeds="", left="-:--:--")
                return
            seconds = time.perf_counter() - begin
            pace = (done - before) / seconds
            speeds = f" {pace:.3g} {items}/s," if paced else ""
            left = min(limit - seconds, (total - done) / pace if pace else math.inf)
            progress.update(
                progress.task_ids[0],
                completed=done,
                total=total,
                speeds=f"{speeds} {tokens / seconds:.0f} tokens/s,",
                left="-:--:--" if math.isinf(left) else str(timedelta(seconds=max(int(left), 0))),
            )

        try:
            yield update
        except KeyboardInterrupt:
            if resumes:
                _say_where(progress, items)
            raise


def _say_where(progress: Progress, items: str) -> None:
    """Say how far work came that was stopped."""
    done = [f"{int(one.completed):,} of {int(one.total or 0):,} {items}" for one in progress.tasks]
    where = next(iter(done), "before the first answer")
    say(f"stopped ({where}); the same command goes on")


@contextmanager
def work_bar(what: str, measure: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with a measure of the work and the time left. Yields a function of (done, in total)."""
    with bars(TextColumn(what), BarColumn(), measure, TimeLeft(), TextColumn("left")) as progress:
        bar = progress.add_task(what, total=0)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


PATIENCE = 1.0
"""Seconds of loading after which a bar shows its progress."""


@contextmanager
def load_bar(text: str) -> Iterator[None]:
    """Show a notice while the block loads a model, and after `PATIENCE` a bar that says what is done."""
    progress, show = _stages()
    with ExitStack() as shown, progress_shown_by(show):
        shown.enter_context(notice(text))
        show("loading libraries", 0, 0)

        def begin() -> None:
            shown.close()
            progress.start()

        timer = threading.Timer(PATIENCE, begin)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            progress.stop()


@contextmanager
def stage_bars() -> Iterator[None]:
    """Show the bar of the stage that the block is at."""
    progress, show = _stages()
    with progress, progress_shown_by(show):
        yield


def _stages() -> tuple[Progress, ShowProgress]:
    """Bars of stages, not yet begun, and what updates them."""
    stages: dict[str, TaskID] = {}
    progress = bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())

    def update(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages[stage] = progress.add_task(stage, total=None)
        for other, bar in stages.items():
            progress.update(bar, visible=other == stage)
        progress.update(stages[stage], completed=done, total=total or None)

    return progress, update


def try_drafters(target: Target, names: Sequence[str] = ()) -> dict[str, Drafter | DrafterError]:
    """Build drafters of the registry for `target`, without options.

    Args:
        target: the model to draft for.
        names: which drafters; empty: all.

    Returns:
        For each name, the drafter or the error that says why it cannot be built.
    """
    from soothsay.drafters.registry import REGISTRY, build_drafter

    built: dict[str, Drafter | DrafterError] = {}
    for name in names or REGISTRY:
        try:
            built[name] = build_drafter(name, target)
        except DrafterError as error:
            built[name] = error
    return built


def fitting_drafters(target: Target, names: Sequence[str] = ()) -> dict[str, Drafter]:
    """Those of `try_drafters` that can be built."""
    tried = try_drafters(target, names)
    return {name: one for name, one in tried.items() if not isinstance(one, DrafterError)}


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A table of names, which are dim, and what belongs to them."""
    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(Text(name, "dim"), Text(fact) if isinstance(fact, str) else fact)
    return table
