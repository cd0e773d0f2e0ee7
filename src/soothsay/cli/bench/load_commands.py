"""`soothsay bench serve` and `soothsay bench busy`: servers under load, and beside busy processes."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from soothsay.cli.bench.bench_options import BenchOptions, check_charts, save_chart, save_numbers
from soothsay.cli.bench.load_options import GoodputOptions, LoadOptions, PromptOptions, parse_target, seconds
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import records_table, result_table
from soothsay.cli.terminal import notice
from soothsay.files import write_text
from soothsay.options import REQUIRED, argument, option, shared

if TYPE_CHECKING:
    from soothsay.bench.serve.serve_bench import ServeBench
    from soothsay.bench.serve.serve_results import LoadResults, Slo


@dataclass(frozen=True, kw_only=True)
class ServersUnderLoad:
    """Measure latency, throughput and goodput of servers under load, several servers in turn.

    All servers get the same conversations in the same order. No conversation comes twice before all have come
    once. Inter-token latency is given by chunk, as a reader sees it, and by token, since a chunk may have
    several. Ctrl-C keeps and shows the results so far. The exit code is 1 if a server answered no request.
    """

    server: list[str] | None = argument(
        None,
        "Servers, such as http://127.0.0.1:8000; with several, ratios are over the first. A URL "
        "without a path gets /v1. Fields may follow: ,model=NAME ,key=VARIABLE (an environment variable) "
        "and fields of every request as JSON, such as ,speculation=false.",
        metavar="[[NAME=]URL]...",
        show_default=False,
    )
    target: list[str] | None = option(
        None, "Another server, written in the same way; may be repeated.", metavar="[NAME=]URL"
    )
    load: LoadOptions
    rounds: int = option(1, "Number of rounds. The server that starts rotates.", min=1)
    warm_up: int = option(2, "Requests sent to each server before its first trial; not counted.", min=1)
    asked: PromptOptions
    max_tokens: int = shared(BenchOptions, "max_tokens")
    ignore_eos: bool = option(False, "Ask for answers of exactly --max-tokens tokens.")
    temperature: float = shared(BenchOptions, "temperature")
    seed: int = option(0, "Seed of the order, the arrivals and the answers.", min=0)
    timeout: str = option("600s", "Time without a byte after which a request fails.", metavar="TIME")
    goodput: GoodputOptions
    to_json: Path | None = shared(BenchOptions, "journal")
    html: Path | None = shared(BenchOptions, "html")
    png: Path | None = shared(BenchOptions, "png")

    def run(self) -> None:
        """Measure, and show the results."""
        check_charts(self.html, self.png)
        with notice("reading prompts ..."):
            from soothsay.bench.serve.serve_bench import LoadPlan, ServeBench

            loads, slo = self.load.loads(), self.goodput.slo()
            silence, named = seconds(self.timeout, "--timeout"), (*(self.server or ()), *(self.target or ()))
            targets = [parse_target(text, silence, self.ignore_eos) for text in named]
            if not targets:
                raise typer.BadParameter("name a server, such as http://127.0.0.1:8000")
            mix = self.asked.mix(self.seed)
            answers = self.max_tokens, self.temperature, self.seed
            plan = LoadPlan(loads, self.rounds, self.warm_up, *answers)
        with progress_bar("asking", "s" if self.load.duration else "conversations") as progress:
            bench = ServeBench(targets, mix, plan, path=self.to_json, progress=progress)
            interrupted = _run(bench)
        _show(bench.results, slo)
        self._draw(bench.results, slo)
        if interrupted:
            raise typer.Exit(130)
        if not all(row.answered for row in bench.results.rows()):
            raise typer.Exit(1)

    def _draw(self, results: LoadResults, slo: Slo) -> None:
        """Write the page and the charts that were asked for, if anything was measured."""
        from soothsay.bench.serve.load_charts import load_chart
        from soothsay.bench.serve.load_page import page

        if results.trials and self.html is not None:
            write_text(self.html, page(results, slo))
        if results.trials:
            save_chart(self.png, lambda: load_chart(results), dpi=110)


def _run(bench: ServeBench) -> bool:
    """Measure. Returns whether Ctrl-C ended it."""
    gc.freeze()  # a walk through all imported objects takes 30 ms, in which nothing is sent or timed
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        return True
    return False


def _show(results: LoadResults, slo: Slo) -> None:
    from soothsay.bench.serve.load_tables import notes, tables

    console = Console(highlight=False)
    if not results.trials:
        console.print("nothing was measured")
        return
    for content in tables(results, slo):
        console.print(result_table(content))
    for note in notes(results, slo):
        console.print(Text(note), soft_wrap=True)


SILENCE = 600.0
"""Seconds without a byte after which a request fails."""


@dataclass(frozen=True, kw_only=True)
class BusyMachine:
    """Measure how fast servers decode while other processes keep the cores of this machine busy.

    Each server answers one request at a time, alone and beside processes that compute all the time. The first
    process is pinned to a core. Share is the part that is left of the speed without them. The longest wait
    between two pieces of text is given in medians of these waits.
    """

    server: list[str] = argument(
        REQUIRED,
        "Servers on this machine, such as http://127.0.0.1:8000. Fields may follow as in "
        "'bench serve', such as ,speculation=false.",
        metavar="[NAME=]URL...",
    )
    loops: list[int] | None = option(
        None, "Number of busy processes; may be repeated.", min=1, show_default="1 and 2"
    )
    rounds: int = option(3, "Number of rounds; figures are medians.", min=1)
    max_tokens: int = shared(BenchOptions, "max_tokens")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Ask the servers, and print a table."""
        targets = [parse_target(text, SILENCE, ignore_eos=True) for text in self.server]
        if len({target.name for target in targets}) < len(targets):
            raise typer.BadParameter("give servers names of their own, as in NAME=http://127.0.0.1:8000")
        with progress_bar("asking", "answers") as progress:
            from soothsay.bench.busy import bench_busy

            asked = {"rounds": self.rounds, "tokens": self.max_tokens}
            found = asyncio.run(bench_busy(targets, self.loops or [1, 2], **asked, progress=progress))
        numbers = {"tokens/s": "{.rate:.1f}", "share": "{.share:.2f}", "longest wait": "{.longest:.1f}"}
        table = records_table(found, {"busy processes": "{.loops}", "server": "{.server}"}, numbers)
        Console(highlight=False).print(table)
        save_numbers(self.to_json, [asdict(one) for one in found])
