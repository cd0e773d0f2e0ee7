"""`soothsay quantize`: a model in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from rich.progress import Task

    from soothsay import calibration as calibration_text
    from soothsay.quantize import Report


def quantize(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory, a hub name, or a bundled model's name.")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; empty, or not there yet.")],
    dtype: Annotated[
        Literal["int8", "int4"],
        typer.Option("--dtype", help="int8: a scale for each output; int4: for each group of inputs."),
    ] = "int4",
    group_size: Annotated[
        int, typer.Option("--group-size", help="Inputs that share a scale in int4: 128, 64 or 32.")
    ] = 128,
    method: Annotated[
        Literal["gptq", "round"] | None,
        typer.Option(
            show_default="gptq for int4, round for int8",
            help="gptq makes up for errors by calibration text; round takes the nearest integers.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default="the model writes its own",
            help="Text for gptq: plain, or .jsonl with 'messages' or 'text'; may be .gz.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of calibration text.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 512,
) -> None:
    """Write a copy of a model in 8 or 4 bits, which loads at once, here and in other engines.

    Linear layers become integers in the format of compressed-tensors; all else stays as it is.
    """
    with notice(f"opening {model} ..."):
        from soothsay.model.checkpoint import open_checkpoint
        from soothsay.quantize import quantize as run

        checkpoint = open_checkpoint(model)
    with _progress() as progress:
        report = run(
            checkpoint,
            out,
            dtype,
            group_size=group_size,
            method=method,
            calibration=calibration,
            samples=samples,
            tokens=tokens,
            progress=progress,
        )
    _show(report, out)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


@contextmanager
def _progress() -> Iterator[calibration_text.Progress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress


def _show(report: Report, out: Path) -> None:
    table = Table.grid(padding=(0, 2))
    what = "outputs" if report.method == "gptq" else "weights"
    for kind, errors in report.errors.items():
        table.add_row(Text(kind, "dim"), f"{fmean(errors):.2%} error of {what}")
    before, after = report.bytes_before, report.bytes_after
    table.add_row(Text("size", "dim"), f"{decimal(before)} before, {decimal(after)} now")
    if report.perplexity is not None:
        was, now = report.perplexity
        table.add_row(
            Text("perplexity", "dim"),
            f"{was:.3f} before, {now:.3f} now ({now / was - 1:+.2%}), of text held back",
        )
    table.add_row(Text("written", "dim"), f"{out}: {report.scheme.name}")
    Console(highlight=False, soft_wrap=True).print(table)
