"""`soothsay bench learn`: measures what learning while serving gains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from soothsay.bench.bench_plans import LearnPlan
from soothsay.cli.bench.bench_options import BenchOptions, check_charts, save_chart, save_numbers
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.options import FILE, REQUIRED, CommonOptions, argument, shared

if TYPE_CHECKING:
    from soothsay.bench.learn import LearnReport


@dataclass(frozen=True, kw_only=True)
class Learn:
    """Answer a stream of requests plainly, with a drafter as it is, and with one that learns.

    The file of --json is written anew after each window. An interruption shows what was measured until then.
    Exits with 1 if an answer differs from plain decoding's.
    """

    model: str = shared(CommonOptions, "model")
    file: Path = argument(REQUIRED, "The stream: JSON lines with 'messages' or 'prompt'.", **FILE)
    plan: LearnPlan
    png: Path | None = shared(BenchOptions, "png")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Answer the stream, and show the results."""
        check_charts(self.png)
        latest: LearnReport | None = None
        try:
            with ExitStack() as loading, progress_bar("answering", "requests", paced=True) as show:
                loading.enter_context(notice(f"reading {self.file}, loading {self.model} ..."))
                from soothsay.bench.learn import bench_learn
                from soothsay.bench.prompt_files import read_prompts

                entries = read_prompts(self.file)[: self.plan.requests]
                if (kept := self.plan.held_out) >= len(entries):
                    raise typer.BadParameter(f"--held-out {kept}: the stream has {len(entries)} requests")

                def progress(report: LearnReport) -> None:
                    nonlocal latest
                    latest = report
                    loading.close()
                    show(report.answered, len(entries), report.tokens)
                    save_numbers(self.to_json, asdict(report))

                bench_learn(self.model, entries, self.plan, progress)
        finally:
            if latest is not None and latest.windows:
                _show(latest, self.png)
        if latest is not None and latest.different:
            raise typer.Exit(1)


def _show(report: LearnReport, png: Path | None) -> None:
    """Print the table, and draw the chart if there is a file for it."""
    from soothsay.bench.learn_chart import learn_chart

    Console(highlight=False).print(_table(report))
    save_chart(png, lambda: learn_chart(report))


def _table(report: LearnReport) -> Table:
    from soothsay.bench.learn import CONTENDERS, PLAIN

    table = numbers_table(
        ("requests", ""),
        ("tokens a step", "tokens/s", "over plain", "tokens per CPU second"),
        title=f"{report.drafter}, learning in {report.share:.0%} of a core's time",
        caption=f"{report.compared - report.different} of {report.compared} answers equal plain decoding's; "
        "windows in which all three ran",
    )
    for held_out in (False, True):
        table.add_section()
        plain = report.total(PLAIN, held_out=held_out)
        for name in CONTENDERS if plain.tokens else ():
            run = report.total(name, held_out=held_out)
            table.add_row(
                ("held out" if held_out else "stream") if name == PLAIN else "",
                name,
                f"{run.accepted:.2f}",
                f"{run.tokens / run.seconds:.0f}",
                f"{run.tokens / run.seconds / (plain.tokens / plain.seconds):.2f}x",
                f"{run.tokens / run.cpu:.0f}",
            )
    return table
