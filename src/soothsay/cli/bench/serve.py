"""`soothsay bench serve`: load on servers that speak OpenAI's protocol."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.bench.bench_options import (
    AnswerTemperatureOption,
    HtmlOption,
    JournalOption,
    PngOption,
    check_charts,
)
from soothsay.cli.bench.load_options import GoodputOptions, LoadOptions, PromptOptions, parse_target, seconds
from soothsay.cli.option_groups import grouped
from soothsay.cli.options import AnswerTokensOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice
from soothsay.files import write_text
from soothsay.plotting import save_png

if TYPE_CHECKING:
    from soothsay.bench.serve.load_tables import LoadTable
    from soothsay.bench.serve.serve_bench import ServeBench
    from soothsay.bench.serve.serve_results import LoadResults, Slo


@grouped
def serve(
    server: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]URL]...",
            help="Servers, such as http://127.0.0.1:8000; with several, ratios are over the first. A URL "
            "without a path gets /v1. Fields may follow: ,model=NAME ,key=VARIABLE (an environment variable) "
            "and fields of every request as JSON, such as ,speculation=false.",
            show_default=False,
        ),
    ] = None,
    *,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Another server, written in the same way; may be repeated."),
    ] = None,
    load: LoadOptions,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds. The server that starts rotates.")] = 1,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Requests sent to each server before its first trial; not counted.")
    ] = 2,
    asked: PromptOptions,
    max_tokens: AnswerTokensOption = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of exactly --max-tokens tokens.")
    ] = False,
    temperature: AnswerTemperatureOption = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order, the arrivals and the answers.")] = 0,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Time without a byte after which a request fails.")
    ] = "600s",
    goodput: GoodputOptions,
    to_json: JournalOption = None,
    html: HtmlOption = None,
    png: PngOption = None,
) -> None:
    """Measure latency, throughput and goodput of servers under load, several servers in turn.

    All servers get the same conversations in the same order. No conversation comes twice before all have come
    once. Inter-token latency is given by chunk, as a reader sees it, and by token, since a chunk may have
    several. Ctrl-C keeps and shows the results so far. The exit code is 1 if a server answered no request.
    """
    check_charts(html, png)
    with notice("reading prompts ..."):
        from soothsay.bench.serve.serve_bench import LoadPlan, ServeBench

        loads, slo, silence = load.loads(), goodput.slo(), seconds(timeout, "--timeout")
        targets = [parse_target(text, silence, ignore_eos) for text in (*(server or ()), *(target or ()))]
        if not targets:
            raise typer.BadParameter("name a server, such as http://127.0.0.1:8000")
        mix = asked.mix(seed)
        plan = LoadPlan(loads, rounds, warm_up, max_tokens, temperature, seed)
    with progress_bar("asking", "s" if load.duration else "conversations") as progress:
        bench = ServeBench(targets, mix, plan, path=to_json, progress=progress)
        interrupted = _run(bench)
    _show(bench.results, slo)
    _draw(bench.results, slo, html, png)
    if interrupted:
        raise typer.Exit(130)
    if not all(row.answered for row in bench.results.rows()):
        raise typer.Exit(1)


def _run(bench: ServeBench) -> bool:
    """Measure. Returns whether Ctrl-C ended it."""
    gc.freeze()  # a walk through all imported objects takes 30 ms, in which nothing is sent or timed
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        return True
    return False


def _draw(results: LoadResults, slo: Slo, html: Path | None, png: Path | None) -> None:
    """Write the page and the charts that were asked for, if anything was measured."""
    from soothsay.bench.serve.load_charts import load_chart
    from soothsay.bench.serve.load_page import page

    if results.trials and html is not None:
        write_text(html, page(results, slo))
    if results.trials and png is not None:
        save_png(load_chart(results), png, dpi=110)


def _show(results: LoadResults, slo: Slo) -> None:
    from soothsay.bench.serve.load_tables import notes, tables

    console = Console(highlight=False)
    if not results.trials:
        console.print("nothing was measured")
        return
    for content in tables(results, slo):
        console.print(_drawn(content))
    for note in notes(results, slo):
        console.print(Text(note), soft_wrap=True)


def _drawn(content: LoadTable) -> Table:
    """Draw a table. Names that equal those of the row above are left out; a line separates loads."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(content.title), title_justify="left")
    for place, heading in enumerate(content.headings):
        named = place < content.names
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named)
    before: list[str] = []
    for row in content.rows:
        if before and row[0] != before[0]:
            table.add_section()
        same = next((i for i in range(content.names) if before[i : i + 1] != row[i : i + 1]), 0)
        table.add_row(*(Text(cell) for cell in (*[""] * same, *row[same:])))
        before = row
    return table
