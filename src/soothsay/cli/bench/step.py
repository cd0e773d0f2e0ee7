"""`soothsay bench step`: what a forward pass costs by its number of rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.options import DTypesOption, known_dtypes
from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from soothsay.bench.step import StepReport


def step(
    model: Annotated[
        str | None,
        typer.Argument(help="A model; see 'generate'.", show_default="a shape with random weights"),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="A Llama with random weights: 0.5B, 1.1B, 3B, or layers=22,hidden=2048,heads=32,kv_heads=4,"
            "ffn=5632,vocab=32000, of which what is left out is as in 1.1B.",
            show_default="1.1B",
        ),
    ] = None,
    dtype: DTypesOption = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass.")] = "1,2,4,8,16,32,64",
    contexts: Annotated[
        list[int] | None,
        typer.Option("--context", min=1, help="Tokens before the rows; may be repeated.", show_default="128"),
    ] = None,
    tree: Annotated[
        Literal["chain", "binary"], typer.Option(help="Rows one below the other, or two below each.")
    ] = "chain",
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each kind; times are medians.")] = 15,
    png: Annotated[
        Path | None, typer.Option("--png", dir_okay=False, help="Draw the times to a file.")
    ] = None,
    to_json: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all numbers to a file.")
    ] = None,
) -> None:
    """Time of a forward pass that verifies M rows, beside the time that it must take at least.

    A pass is packing, all blocks, and the head for every row. The floor is the longer of two times: reading
    all weights and the context's keys and values once, and the arithmetic, at the rates that this run finds.
    """
    if model is not None and shape is not None:
        raise typer.BadParameter("give a model or --shape, not both")
    counts, dtypes = _counts(rows), known_dtypes(dtype)
    with notice("measuring ..."):
        from soothsay.bench.plot import new_figure, plot_steps
        from soothsay.bench.shapes import Shape
        from soothsay.bench.step import bench_step

        if png is not None:
            new_figure()  # says that matplotlib is missing before anything takes its time
        report = bench_step(
            Shape.parse(shape or "1.1B") if model is None else model,
            dtypes=dtypes,
            rows=counts,
            contexts=contexts or [128],
            rounds=rounds,
            layout=tree,
        )
    Console(highlight=False).print(_table(report))
    if png is not None:
        plot_steps(report, png)
    if to_json is not None:
        to_json.write_text(json.dumps(asdict(report), indent=1) + "\n")


def _counts(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]."""
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"--rows {text}: numbers with commas between them are needed, as in 1,2,4")
    return [int(part) for part in text.split(",")]


def _table(report: StepReport) -> Table:
    rates = ", ".join(f"{rate / 1e9:.0f} Gop/s in {dtype}" for dtype, rate in report.rates.items())
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{Path(report.model).name}, {report.layout}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read, {rates}",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("dtype", "context"):
        table.add_column(heading)
    for heading in ("rows", "ms", "of one row", "floor, ms", "of the floor", "GB read"):
        table.add_column(heading, justify="right")
    for number, time in enumerate(report.times):
        before = report.times[number - 1] if number else None
        first = before is None or (before.dtype, before.context) != (time.dtype, time.context)
        if first:
            table.add_section()
        table.add_row(
            *((time.dtype, f"{time.context:,}") if first else ("", "")),
            str(time.rows),
            f"{time.ms:.2f}",
            f"{time.ratio:.2f}x",
            f"{time.floor_ms:.2f}",
            f"{time.ms / time.floor_ms:.2f}x",
            f"{time.bytes / 1e9:.3f}",
        )
    return table
