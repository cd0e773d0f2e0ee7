"""`soothsay bench step`: measures a forward pass by its number of rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import (
    DTypesOption,
    JsonOption,
    PassesOption,
    PngOption,
    RowsOption,
    check_charts,
    known_dtypes,
    row_counts,
)
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.files import write_json
from soothsay.plotting import save_png

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
            help="A Llama with random weights: 0.5B, 1.1B, 3B, hybrid (a Qwen3.5), or "
            "layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000, of which what is left out is as "
            "in 1.1B. With experts=32,chosen=4, ffn is that of one expert.",
            show_default="1.1B",
        ),
    ] = None,
    dtype: DTypesOption = None,
    rows: RowsOption = "1,2,4,8,16,32,64",
    contexts: Annotated[
        list[int] | None,
        typer.Option(
            "--context", min=1, help="Number of tokens before the rows; may be repeated.", show_default="128"
        ),
    ] = None,
    tree: Annotated[
        Literal["chain", "binary"],
        typer.Option(help="Shape of the rows' tree: a path, or two children a node."),
    ] = "chain",
    rounds: PassesOption = 15,
    png: PngOption = None,
    to_json: JsonOption = None,
) -> None:
    """Measure a forward pass that verifies M rows, and the least time that it can take (the floor).

    A pass packs the rows and runs all blocks, and the head for every row. The floor is the longer of two
    times, at the rates measured in this run: reading all weights and the context's keys and values once, and
    the arithmetic.
    """
    if model is not None and shape is not None:
        raise typer.BadParameter("give a model or --shape, not both")
    check_charts(png)
    counts, dtypes = row_counts(rows), known_dtypes(dtype)
    with notice("measuring ..."):
        from soothsay.bench.shapes import LlamaShape
        from soothsay.bench.step import bench_step
        from soothsay.bench.step_chart import step_chart

        report = bench_step(
            LlamaShape.parse(shape or "1.1B") if model is None else model,
            dtypes=dtypes,
            rows=counts,
            contexts=contexts or [128],
            rounds=rounds,
            layout=tree,
        )
    Console(highlight=False).print(_table(report))
    if png is not None:
        save_png(step_chart(report), png, dpi=150)
    if to_json is not None:
        write_json(to_json, asdict(report), indent=1)


def _table(report: StepReport) -> Table:
    rates = ", ".join(f"{rate / 1e9:.0f} Gop/s in {dtype}" for dtype, rate in report.rates.items())
    table = numbers_table(
        ("dtype", "context"),
        ("rows", "ms", "of one row", "floor, ms", "of the floor", "GB read"),
        title=f"{Path(report.model).name}, {report.layout}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read, {rates}",
    )
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
