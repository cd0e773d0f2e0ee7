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

from soothsay.cli.bench.bench_options import HtmlOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice
from soothsay.files import write_text
from soothsay.plotting import require_matplotlib, save_png

if TYPE_CHECKING:
    from soothsay.bench.serve.load_tables import LoadTable
    from soothsay.bench.serve.serve_bench import ServeBench
    from soothsay.bench.serve.serve_results import LoadResults, Slo

_ARRIVALS, _PROMPTS, _PROMISES = "Load: at most one of the first three", "Prompts", "Goodput"


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
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Another server, written in the same way; may be repeated."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=_ARRIVALS,
            show_default="4",
            help="Closed loop: N clients, each sending its next request when it has its answer.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            rich_help_panel=_ARRIVALS,
            help="Open loop: R requests a second on average, at times of a Poisson process.",
        ),
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=_ARRIVALS,
            help="N requests at once, and the next N when all are answered.",
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=_ARRIVALS,
            show_default="32",
            help="Conversations in a trial: one number, or one for each level.",
        ),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            rich_help_panel=_ARRIVALS,
            help="In place of --requests: time in which conversations begin.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds. The server that starts rotates.")] = 1,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Requests sent to each server before its first trial; not counted.")
    ] = 2,
    spec_bench: Annotated[
        Path | None,
        typer.Option(
            "--spec-bench",
            exists=True,
            dir_okay=False,
            rich_help_panel=_PROMPTS,
            help="JSON lines with category and turns.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            rich_help_panel=_PROMPTS,
            show_default="256 short requests",
            help="JSON lines with messages, turns or a prompt; or a .txt file with a prompt in each line.",
        ),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=_PROMPTS, help="Turns of a conversation, each after the server's answer."
        ),
    ] = 1,
    shared_prefix: Annotated[
        int,
        typer.Option(
            metavar="WORDS", min=0, rich_help_panel=_PROMPTS, help="Length of a system message for all."
        ),
    ] = 0,
    long: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            rich_help_panel=_PROMPTS,
            help="Share of prompts with a long text.",
        ),
    ] = 0.0,
    long_words: Annotated[
        int, typer.Option(metavar="WORDS", min=1, rich_help_panel=_PROMPTS, help="Length of a long text.")
    ] = 1000,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Largest number of tokens of an answer.")
    ] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of exactly --max-tokens tokens.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="0: always the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order, the arrivals and the answers.")] = 0,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Time without a byte after which a request fails.")
    ] = "600s",
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", rich_help_panel=_PROMISES, help="Limit to the first token, such as 500ms."
        ),
    ] = None,
    slo_itl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", rich_help_panel=_PROMISES, help="Limit of an answer's mean time between tokens."
        ),
    ] = None,
    slo_e2e: Annotated[
        str | None, typer.Option(metavar="TIME", rich_help_panel=_PROMISES, help="Limit to the end.")
    ] = None,
    to_json: Annotated[
        Path | None,
        typer.Option(
            "--json", dir_okay=False, help="Append every request to this file; an existing file is continued."
        ),
    ] = None,
    html: HtmlOption = None,
    png: Annotated[
        Path | None, typer.Option("--png", dir_okay=False, help="Draw charts to this file.")
    ] = None,
) -> None:
    """Measure latency, throughput and goodput of servers under load, several servers in turn.

    All servers get the same conversations in the same order. No conversation comes twice before all have come
    once. Inter-token latency is given by chunk, as a reader sees it, and by token, since a chunk may have
    several. Ctrl-C keeps and shows the results so far. The exit code is 1 if a server answered no request.
    """
    if html is not None or png is not None:
        require_matplotlib()  # before the long run
    with notice("reading prompts ..."):
        from soothsay.bench.serve.serve_bench import LoadPlan, ServeBench
        from soothsay.cli.bench.load_options import parse_loads, parse_mix, parse_slo, parse_target, seconds

        loads = parse_loads({"concurrency": concurrency, "rate": rate, "burst": burst}, requests, duration)
        silence, slo = seconds(timeout, "--timeout"), parse_slo(slo_ttft, slo_itl, slo_e2e)
        targets = [parse_target(text, silence, ignore_eos) for text in (*(server or ()), *(target or ()))]
        if not targets:
            raise typer.BadParameter("name a server, such as http://127.0.0.1:8000")
        passages = {"shared_prefix": shared_prefix, "long_share": long, "long_words": long_words}
        mix = parse_mix(spec_bench, prompts, seed, turns=turns, **passages)
        plan = LoadPlan(loads, rounds, warm_up, max_tokens, temperature, seed)
    with progress_bar("asking", "s" if duration else "conversations") as progress:
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
